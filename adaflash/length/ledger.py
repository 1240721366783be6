"""What drafting brought and cost so far, by load: the price of a second, and whether to draft at all.

Seconds are those of the cost table, so the books are the same on a busy and on an idle machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BUCKETS = 16  # loads 1, 2, 3-4, 5-8, ...
KEEP = 0.998  # weight of the past per drafted round: some 500 rounds are remembered, so that traffic may change
FRESH = 8.0  # rounds that are remembered after drafting was given up: probes are rare and must count
DOUBT = 1.0  # variance of a round's gain that is assumed at first, worth one round
SURE = 1.5  # standard errors below 1 at which drafting is given up: it is asked after every round, so chance adds up


class Ledger:
    """Sums over drafted rounds of each load bucket, forgetting slowly.

    Args:
        probe_every: While drafting is off, one round in so many is drafted all the same.
        hysteresis: The gain at which drafting is taken up again.
    """

    def __init__(self, probe_every: int, hysteresis: float) -> None:
        self.probe_every, self.hysteresis = probe_every, hysteresis
        # Committed; modelled seconds; what plain steps commit in them; rounds; squares of each round's own gain.
        self.tokens, self.seconds, self.plain, self.rounds, self.squares = (
            torch.zeros(BUCKETS, dtype=torch.float64) for _ in range(5)
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

    def drafted(self, load: int, committed: int, seconds: float, plain_tokens: float) -> None:
        """Book a drafted round: `plain_tokens` are what plain steps commit in its seconds."""
        at = bucket(load)
        news = committed, seconds, plain_tokens, 1.0, (committed / plain_tokens) ** 2
        for sums, new in zip(self._sums(), news, strict=True):
            sums[at] = sums[at] * KEEP + new
        self.since[at] = 0
        self._judge(at)

    def stepped(self, load: int) -> None:
        """Book a plain step."""
        self.since[bucket(load)] += 1

    def state(self) -> Tensor:
        """Everything as one float64 tensor [7, BUCKETS]."""
        return torch.stack([*self._sums(), self.off.double(), self.since.double()])

    def restore(self, state: Tensor) -> None:
        """The inverse of `state`."""
        for sums, row in zip(self._sums(), state.cpu(), strict=False):
            sums.copy_(row)
        self.off, self.since = state[5].cpu().bool(), state[6].cpu().long()

    def _judge(self, at: int) -> None:
        """Off below a gain of 1, on again above the hysteresis; by more than chance explains."""
        gain = float(self.tokens[at] / self.plain[at])
        if bool(self.off[at]):
            self.off[at] = gain <= self.hysteresis
        elif gain < 1 - SURE * self._chance(at, gain):
            self.off[at] = True
            keep = min(1.0, FRESH / float(self.rounds[at]))
            for sums in self._sums():
                sums[at] *= keep

    def _chance(self, at: int, gain: float) -> float:
        """Standard error of the mean gain: a worse one is chance until enough rounds agree."""
        rounds = float(self.rounds[at])
        variance = max(float(self.squares[at]) / rounds - gain**2, 0.0) + DOUBT / rounds
        return math.sqrt(variance / rounds)

    def _sums(self) -> tuple[Tensor, ...]:
        return self.tokens, self.seconds, self.plain, self.rounds, self.squares


def bucket(load: int) -> int:
    """0 for 1 request, 1 for 2, 2 for 3-4, 3 for 5-8, ..."""
    return min((load - 1).bit_length(), BUCKETS - 1)
