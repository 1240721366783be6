"""What decoding counts: whole numbers that add up over rounds, requests, domains and ranks, divided only at the end.

Every rate of DESIGN section 8 is a pair (numerator, denominator) of sums; a mean of means is never taken.
What the sums mean near the end of a response (E = its length in absolute positions, a = the anchor):

- `committed` is what was kept: a round cut at a stop or limit counts the kept tokens only.
- `accepted` counts candidates that are part of the response: one behind a stop token did not survive the cut.
- A candidate at a position >= E is *censored*: nobody can say whether it would have been accepted, so it is not at risk
  in the rates by position. It was sent all the same, so it stays in `verified` (what verification costs).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from adaflash.blocks import agreeing_prefix, build_blocks
from adaflash.types import Trajectory

Ratio = tuple[int, int]


@dataclass(frozen=True)
class Tally:
    """Sums over requests. K entries in `at_risk` and `survived` (candidate 1 first), K + 1 in `lengths` (L = 0 first)."""

    requests: int = 0
    errors: int = 0  # of these, requests with finish "error"; what they had done by then is counted
    rounds: int = 0  # rounds that drafted
    plain_steps: int = 0  # target passes without a draft; each commits one token
    committed: int = 0  # sum of c over drafted rounds
    verified: int = 0  # sum of L: candidates sent to the target
    accepted: int = 0  # sum of A
    labelled: int = 0  # rounds whose oracle length is known: every candidate known, not cut by a length limit
    lost: int = 0  # over labelled rounds: accepted had L been K, minus A
    wasted: int = 0  # over labelled rounds: L - A
    at_risk: tuple[int, ...] = ()  # [K] rounds that sent candidate k, all before it accepted
    survived: tuple[int, ...] = ()  # [K] of those, rounds that accepted candidate k
    lengths: tuple[int, ...] = ()  # [K + 1] rounds by their L

    @classmethod
    def from_vector(cls, vector: Tensor, block_size: int) -> Tally:
        """The inverse of `count`: int64 [width(block_size)] -> Tally."""
        values = [int(value) for value in vector.tolist()]
        candidates = block_size - 1
        ends = [len(SINGLE), len(SINGLE) + candidates, len(SINGLE) + 2 * candidates]
        tails = (values[ends[0] : ends[1]], values[ends[1] : ends[2]], values[ends[2] :])
        return cls(*values[: ends[0]], *(tuple(tail) for tail in tails))  # type: ignore[arg-type]

    def ratios(self) -> dict[str, Ratio]:
        """Every rate as (numerator, denominator), named as in the log."""
        passes = self.rounds + self.plain_steps
        kept = self.committed + self.plain_steps
        sent = self.verified + passes
        return {
            "tau": (self.committed, self.rounds),
            "tokens_per_pass": (kept, passes),
            "acceptance": (self.accepted, self.verified),
            "utilisation": (kept, sent),
            "verified_per_committed": (sent, kept),
            "plain_share": (self.plain_steps, passes),
            "length/mean": (self.verified, self.rounds),
            "length/wasted": (self.verified - self.accepted, self.rounds),
            "length/lost": (self.lost, self.labelled),
            "length/regret": (self.lost + self.wasted, self.labelled),
            **{f"acceptance/{k + 1}": pair for k, pair in enumerate(self.conditional())},
        }

    def conditional(self) -> list[Ratio]:
        """[K] (accepted k, at risk at k): acceptance of candidate k given that all before it were accepted."""
        return list(zip(self.survived, self.at_risk, strict=True))

    def survival(self) -> list[float | None]:
        """[K] Kaplan-Meier estimate of P(A >= k): product of the conditional rates; None once it cannot be known."""
        alive: float | None = 1.0
        curve: list[float | None] = []
        for survived, at_risk in self.conditional():
            if alive:  # after 0 nothing can survive; after None nothing is known
                alive = alive * survived / at_risk if at_risk else None
            curve.append(alive)
        return curve

    def numbers(self) -> dict[str, float]:
        """Every rate whose denominator is not 0, and the survival curve as `survival/{k}`."""
        rates = {name: top / bottom for name, (top, bottom) in self.ratios().items() if bottom}
        curve = {f"survival/{k + 1}": alive for k, alive in enumerate(self.survival())}
        return rates | {name: alive for name, alive in curve.items() if alive is not None}

    def counts(self) -> dict[str, int]:
        """The sums themselves, flat: `rounds`, ..., `at_risk/1`, ..., `lengths/0`, ..."""
        flat: dict[str, int] = {name: getattr(self, name) for name in SINGLE}
        for name, first in (("at_risk", 1), ("survived", 1), ("lengths", 0)):
            flat |= {f"{name}/{first + i}": value for i, value in enumerate(getattr(self, name))}
        return flat


SINGLE = tuple(field.name for field in fields(Tally) if field.name not in ("at_risk", "survived", "lengths"))


def width(block_size: int) -> int:
    """How many sums one tally holds."""
    return len(SINGLE) + 3 * (block_size - 1) + 1


def count(trajectory: Trajectory, block_size: int) -> Tensor:
    """One trajectory as a vector of sums, int64 [width(block_size)], in the order of the fields of `Tally`.

    The oracle length of a round is the agreement of all K candidates with the trajectory: under exact match (greedy, or
    position-keyed sampling) that is what would have been accepted had L been K. Rounds with a candidate that was never
    computed (-1), or that a length limit cut off, are left out by that fact alone, never by their outcome.
    """
    _check(trajectory, block_size)
    log = trajectory.blocks
    if not len(log.anchors):
        return _nothing_drafted(trajectory, block_size)
    blocks = build_blocks([trajectory], [log.anchors], block_size, mask_id=0)
    inside = blocks.supervised  # [n, K] candidate k sits on a token of the response
    accepted = torch.minimum(log.accepted, inside.sum(1))
    k = torch.arange(1, block_size, device=accepted.device)
    at_risk = inside & (k <= log.lengths[:, None]) & (k <= accepted[:, None] + 1)
    labelled = blocks.full & ((log.candidates >= 0) | ~inside).all(1)
    oracle = agreeing_prefix(log.candidates, blocks.labels, inside)
    single = {
        "requests": 1,
        "errors": int(trajectory.finish == "error"),
        "rounds": len(log.anchors),
        "plain_steps": trajectory.plain_steps,
        "committed": int(log.committed.sum()),
        "verified": int(log.lengths.sum()),
        "accepted": int(accepted.sum()),
        "labelled": int(labelled.sum()),
        "lost": int((oracle - accepted)[labelled].sum()),
        "wasted": int((log.lengths - accepted)[labelled].sum()),
    }
    survived = at_risk & (k <= accepted[:, None])
    return _vector(single, at_risk.sum(0), survived.sum(0), torch.bincount(log.lengths, minlength=block_size))


def _vector(single: dict[str, int], at_risk: Tensor, survived: Tensor, lengths: Tensor) -> Tensor:
    head = torch.tensor([single.get(name, 0) for name in SINGLE], dtype=torch.int64, device=lengths.device)
    return torch.cat([head, at_risk, survived, lengths])


def _nothing_drafted(trajectory: Trajectory, block_size: int) -> Tensor:
    """Plain decoding, a recorded response, or a request that could not be served."""
    none = torch.zeros(block_size, dtype=torch.int64)
    failed = trajectory.finish == "error"
    single = {"requests": 1, "errors": int(failed), "plain_steps": trajectory.plain_steps}
    return _vector(single, none[1:], none[1:], none)


def _check(trajectory: Trajectory, block_size: int) -> None:
    log = trajectory.blocks
    candidates = block_size - 1
    if len(log.anchors) and log.candidates.shape[1] != candidates:
        raise ValueError(
            f"request {trajectory.id!r} was drafted with block_size {log.candidates.shape[1] + 1}, "
            f"but these numbers are for block_size {block_size}"
        )
    wrong = (log.accepted > log.lengths) | (log.lengths > candidates) | (log.committed > log.accepted + 1)
    if wrong.any():
        first = int(wrong.nonzero()[0, 0])
        values = int(log.lengths[first]), int(log.accepted[first]), int(log.committed[first])
        raise ValueError(
            f"request {trajectory.id!r}, round {first}: length, accepted, committed = {values}, "
            f"but accepted <= length <= {candidates} and committed <= accepted + 1 must hold"
        )
