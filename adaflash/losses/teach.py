"""The teacher of one group of positions, computed once and read by every candidate they teach. No gradient anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.losses.numerics import NumericalError, argmax_rows, below_top, check_rows
from adaflash.losses.workspace import Workspace

Head = Callable[[Tensor], Tensor]
Law = Callable[[Tensor], Tensor]
"""Logits [M, V] -> the probabilities [M, V] that the target samples from, after temperature and filters."""


@dataclass(frozen=True)
class Taught:
    """Teacher of P positions, and which of them teaches each of M rows."""

    back: Tensor  # [M] int64, 0 .. P - 1
    choice: Tensor  # [M] the teacher's argmax
    logits: Tensor  # [P, V] raw; log-probabilities where raw ones were not asked for
    log_q: Tensor  # [P, V] log-probabilities; [0, V] where no closed form asked for them
    q: Tensor  # [P, V] probabilities, likewise
    law: Tensor | None = None  # [P, V] what the target samples from, if that is asked for

    def rows(self, start: int, end: int) -> Taught:
        """The same positions for rows start .. end - 1."""
        return Taught(self.back[start:end], self.choice[start:end], self.logits, self.log_q, self.q, self.law)

    def survival(self, candidates: Tensor) -> Tensor:
        """Chance that the target samples each candidate [M] itself; 0 where that was not asked for."""
        if self.law is None:
            return torch.zeros(len(candidates), device=candidates.device)
        return self.law[self.back, candidates].float()

    def expanded(self) -> Tensor:
        """`logits` row by row, [M, V]."""
        return self.logits.index_select(0, self.back)


@torch.no_grad()
def teach(
    position: Tensor, states: Tensor, head: Head, work: Workspace, spread: bool, raw: bool, law: Law | None = None
) -> Taught:
    """Run the head once per position of M rows, and with `spread` take the whole distribution; keep what is asked for.

    Raises:
        NumericalError: a row that is no distribution, counted in the M rows.
    """
    unique, back = position.unique_consecutive(return_inverse=True)
    logits = head(states.index_select(0, unique)).detach()
    log_q, q = work.teacher(len(unique) if spread else 0, logits)
    choice = torch.empty_like(unique)

    def tile(_: int, rows: slice) -> Tensor:
        top, choice[rows] = argmax_rows(logits[rows])
        return _distribution(logits[rows], top, log_q[rows], q[rows]) if spread else top

    if not all(total.isfinite().all() for total in work.map(tile, logits)):
        _complain(logits, back)
    played = law(logits) if law else None
    return Taught(back, choice.index_select(0, back), logits if raw or not spread else log_q, log_q, q, played)


def _distribution(logits: Tensor, top: Tensor, log_q: Tensor, q: Tensor) -> Tensor:
    """Fill log_q and q; the sum before normalising, which is finite for any row that is a distribution."""
    total = torch.exp(below_top(logits, top, log_q), out=q).sum(-1)
    q.mul_(total.reciprocal()[:, None])
    log_q.sub_(total.log()[:, None])
    return total


def _complain(logits: Tensor, back: Tensor) -> None:
    try:
        check_rows(logits, "teacher logits")
    except NumericalError as error:
        row = int((back == error.row).nonzero()[0])
        raise NumericalError(error.what, row, error.problem) from None
