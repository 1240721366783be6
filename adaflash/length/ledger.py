"""What drafting brought and cost so far, by load: the price of a second, and whether to draft at all.

Seconds are those of the cost table, so the books are the same on a busy and on an idle machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BUCKETS = 16  # loads 1, 2, 3-4, 5-8, ...
KEEP = 0.995  # weight of the past per drafted round: some 200 rounds are remembered, so that traffic may change
FRESH = 8.0  # rounds that are remembered after drafting was given up: probes are rare and must count
NOISE = 0.5  # spread of committed / tau of one request's round, about: a worse mean is chance until it is certain


class Ledger:
    """Sums over drafted rounds of each load bucket, forgetting slowly.

    Args:
        probe_every: While drafting is off, one round in so many is drafted all the same.
        hysteresis: The gain at which drafting is taken up again.
    """

    def __init__(self, probe_every: int, hysteresis: float) -> None:
        self.probe_every, self.hysteresis = probe_every, hysteresis
        (
            self.tokens,
            self.seconds,
            self.plain,
            self.requests,
        ) = (  # committed; modelled; plain tokens in that time; blocks
            torch.zeros(BUCKETS, dtype=torch.float64) for _ in range(4)
        )
        self.off = torch.zeros(BUCKETS, dtype=torch.bool)
        self.since = torch.zeros(BUCKETS, dtype=torch.int64)  # plain steps since the last drafted round

    def price(self, load: int, plain_seconds: float) -> float:
        """Lambda, tokens a second: committed over modelled seconds so far; at first what plain decoding does."""
        at = bucket(load)
        return float((self.tokens[at] + load) / (self.seconds[at] + plain_seconds))

    def gain(self, load: int) -> float | None:
        """Realised tokens of drafted rounds over those of plain steps in the same seconds."""
        at = bucket(load)
        return float(self.tokens[at] / self.plain[at]) if self.plain[at] > 0 else None

    def wants_draft(self, load: int) -> bool:
        """Drafting is on at this load, or it is time for a probe."""
        at = bucket(load)
        return not bool(self.off[at]) or int(self.since[at]) >= self.probe_every - 1

    def drafted(self, load: int, requests: int, committed: int, seconds: float, plain_tokens: float) -> None:
        """Book a drafted round: `plain_tokens` are what plain steps commit in its seconds."""
        at = bucket(load)
        for sums, new in zip(self._sums(), (committed, seconds, plain_tokens, requests), strict=True):
            sums[at] = sums[at] * KEEP + new
        self.since[at] = 0
        self._judge(at)

    def stepped(self, load: int) -> None:
        """Book a plain step."""
        self.since[bucket(load)] += 1

    def state(self) -> Tensor:
        """Everything as one float64 tensor [6, BUCKETS]."""
        return torch.stack([*self._sums(), self.off.double(), self.since.double()])

    def restore(self, state: Tensor) -> None:
        """The inverse of `state`."""
        for sums, row in zip(self._sums(), state.cpu(), strict=False):
            sums.copy_(row)
        self.off, self.since = state[4].cpu().bool(), state[5].cpu().long()

    def _judge(self, at: int) -> None:
        """Off below a gain of 1, on again above the hysteresis; by more than chance explains."""
        gain = float(self.tokens[at] / self.plain[at])
        if bool(self.off[at]):
            self.off[at] = gain <= self.hysteresis
        elif gain < 1 - NOISE / math.sqrt(float(self.requests[at])):
            self.off[at] = True
            keep = min(1.0, FRESH * float(2**at) / float(self.requests[at]))
            for sums in self._sums():
                sums[at] *= keep

    def _sums(self) -> tuple[Tensor, ...]:
        return self.tokens, self.seconds, self.plain, self.requests


def bucket(load: int) -> int:
    """0 for 1 request, 1 for 2, 2 for 3-4, 3 for 5-8, ..."""
    return min((load - 1).bit_length(), BUCKETS - 1)
