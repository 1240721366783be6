"""Candidates as flat rows, and the order in which they are walked: by the position that teaches them.

Blocks overlap, so that one position teaches several candidates (512 blocks of 16 on 2,048 positions: 7,680 rows). Rows
of one position stand together; a *group* is a run of positions whose teacher logits exist at one time, a *chunk* a run
of rows whose student logits do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from adaflash.losses.numerics import NumericalError


@dataclass(frozen=True)
class Rows:
    """M candidates to walk through."""

    index: Tensor  # [M] int64, n * K + k - 1: block and candidate
    hidden: Tensor  # [M, H] drafter states, detached
    token: Tensor  # [M] data token
    position: Tensor | None  # [M] int64 row of the teacher's states that teaches, ascending; None: no teacher

    def __len__(self) -> int:
        return len(self.index)

    def part(self, start: int, end: int) -> Rows:
        """Rows start .. end - 1."""
        position = None if self.position is None else self.position[start:end]
        return Rows(self.index[start:end], self.hidden[start:end], self.token[start:end], position)

    def where(self, mask: Tensor) -> Rows:
        """The rows of a mask [M]."""
        position = None if self.position is None else self.position[mask]
        return Rows(self.index[mask], self.hidden[mask], self.token[mask], position)

    @classmethod
    def gather(cls, hidden: Tensor, token: Tensor, supervised: Tensor, positions: Tensor | None) -> Rows:
        """The supervised candidates of hidden [N, B, H] and token, supervised, positions [N, K], by position."""
        index = supervised.flatten().nonzero().squeeze(1)
        if positions is not None:
            index = index[positions.flatten()[index].argsort(stable=True)]
        states = hidden.detach().flatten(0, 1).index_select(0, slots(index, supervised.shape[1]))
        return cls(index, states, token.flatten()[index], None if positions is None else positions.flatten()[index])

    @contextmanager
    def located(self) -> Iterator[None]:
        """A `NumericalError` from within counts these rows: let it count candidates of the batch."""
        try:
            yield
        except NumericalError as error:
            raise NumericalError(error.what, int(self.index[error.row]), error.problem) from None

    def groups(self, limit: int) -> Iterator[tuple[int, int]]:
        """Runs of at most `limit` positions, never cut within a position; everything where there is no teacher."""
        if self.position is None:
            yield from [(0, len(self))] if len(self) else []
            return
        counts = self.position.unique_consecutive(return_counts=True)[1].tolist()
        start = 0
        while counts:
            taken = _whole_chunks(counts[:limit], limit)
            end = start + sum(counts[:taken])
            yield start, end
            start, counts = end, counts[taken:]

    def chunks(self, limit: int) -> Iterator[tuple[int, int]]:
        """Runs of at most `limit` rows, as even as they can be."""
        pieces = -(-len(self) // limit)
        yield from ((len(self) * i // pieces, len(self) * (i + 1) // pieces) for i in range(pieces))


def slots(index: Tensor, candidates: int) -> Tensor:
    """Row of the flat states [N * B] for candidate n * K + k - 1: slot k of block n."""
    return index + index // candidates + 1


def _whole_chunks(counts: list[int], limit: int) -> int:
    """How many positions to take so that their rows fill whole chunks, if they fill one at all."""
    full = max(sum(counts) // limit, 1) * limit
    taken, rows = 0, 0
    for count in counts:
        if taken and rows + count > full:
            break
        taken, rows = taken + 1, rows + count
    return taken
