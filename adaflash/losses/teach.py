"""The teacher of one group of positions, computed once and read by every candidate they teach. No gradient anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from adaflash.losses.numerics import NumericalError, argmax_rows, below_top, check_rows
from adaflash.losses.workspace import Workspace
from adaflash.vocabulary import DraftVocabulary

Head = Callable[[Tensor], Tensor]
Law = Callable[[Tensor], Tensor]
"""Logits [M, V] -> the probabilities [M, V] that the target samples from, after temperature and filters."""


@dataclass(frozen=True)
class Taught:
    """Teacher of P positions, and which of them teaches each of M rows; n tokens the drafter can say, of V."""

    back: Tensor  # [M] int64, 0 .. P - 1
    choice: Tensor  # [M] the teacher's argmax
    logits: Tensor  # [P, V] raw; log-probabilities where raw ones were not asked for
    log_q: Tensor  # [P, n] log-probabilities; [0, n] where no closed form asked for them
    q: Tensor  # [P, n] probabilities, likewise; they sum to less than 1 where n < V
    law: Tensor | None = None  # [P, V] what the target samples from, if that is asked for
    beyond: Tensor | None = None  # [P, 3] of what cannot be said: its mass, the same clipped, how many were clipped

    def rows(self, start: int, end: int) -> Taught:
        """The same positions for rows start .. end - 1."""
        return replace(self, back=self.back[start:end], choice=self.choice[start:end])

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
    position: Tensor,
    states: Tensor,
    head: Head,
    work: Workspace,
    spread: bool,
    raw: bool,
    law: Law | None = None,
    said: DraftVocabulary | None = None,
    limit: float = inf,
) -> Taught:
    """Run the head once per position of M rows, and with `spread` take the whole distribution; keep what is asked for.

    Of a distribution only what the drafter can say (`said`) is kept, unnormalised, and sums over the rest, whose entries
    are clipped at `limit`.

    Raises:
        NumericalError: a row that is no distribution, counted in the M rows.
    """
    unique, back = position.unique_consecutive(return_inverse=True)
    logits = head(states.index_select(0, unique)).detach()
    count = len(unique) if spread else 0
    log_q, q = work.teacher(count, logits if said is None else logits[:, : len(said.tokens)])
    choice, beyond = torch.empty_like(unique), None if said is None else q.new_zeros(count, 3)

    def tile(worker: int, rows: slice) -> Tensor:
        top, choice[rows] = argmax_rows(logits[rows])
        if not spread:
            return top
        if said is None or beyond is None:
            return _distribution(logits[rows], top, log_q[rows], q[rows])
        wide_log, wide, spare = work.tile(worker, logits[rows], "teacher")
        total = _distribution(logits[rows], top, wide_log, wide)
        torch.index_select(wide_log, 1, said.tokens, out=log_q[rows])
        torch.index_select(wide, 1, said.tokens, out=q[rows])
        _rest(wide.index_fill_(1, said.tokens, 0), limit, spare, beyond[rows])
        return total

    if not all(total.isfinite().all() for total in work.map(tile, logits)):
        _complain(logits, back)
    played = law(logits) if law else None
    kept = logits if raw or not spread or said is not None else log_q
    return Taught(back, choice.index_select(0, back), kept, log_q, q, played, beyond)


def _rest(outside: Tensor, limit: float, spare: Tensor, into: Tensor) -> None:
    """Mass of a tile's rows, their mass with entries clipped, and how many were clipped: into [., 3]."""
    into[:, 0], into[:, 1] = outside.sum(-1), torch.clamp(outside, max=limit, out=spare).sum(-1)
    into[:, 2] = torch.gt(outside, limit, out=spare).sum(-1)


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
