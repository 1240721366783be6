"""The one place that masks, weights, chunks over rows and adds up: from the drafter's states to the loss.

    supervised candidates -> position weights -> rows grouped by teaching position -> terms, chunk by chunk -> sums

Nothing is divided here: `loss` is a sum and `weight` its denominator, so that micro-batches and ranks add up exactly
(DESIGN section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.blocks import teacher_positions
from adaflash.losses.base import LossTerm, check_names
from adaflash.losses.chunked import Attach, Walk, trainable
from adaflash.losses.numerics import NumericalError
from adaflash.losses.position import FirstPass, PositionWeight
from adaflash.losses.rows import Rows
from adaflash.losses.sampling import SlotSampling
from adaflash.losses.teach import Head
from adaflash.types import Blocks


@dataclass(frozen=True)
class StepResult:
    """Sums over the candidates of one micro-batch."""

    loss: Tensor  # scalar: sum over rows of w * sum over terms of weight * term; differentiable
    weight: Tensor  # scalar float64: sum of w
    terms: dict[str, Tensor]  # name -> sum of w * term, detached float64
    candidates: Tensor  # [N, K] int64: the drafter's argmax where supervised (see `sampling`), -1 elsewhere
    stats: dict[str, Tensor]  # "{term}/{share}" -> [2] float64: numerator and denominator


class DraftStep:
    """Loss of drafted blocks under a list of terms.

    Args:
        terms: what is summed; the list is kept, so that terms added to it later count too.
        weights: how much each candidate of a block counts.
        chunk_rows: rows whose logits exist at one time.
        closed_form: False to take every gradient by autograd (slower; the oracle of the closed forms).
        sampling: differentiate a sample of the candidates only, unbiased. Of the others a candidate is computed only
            where no kept one before it is wrong already (-1 elsewhere), which is all that acceptance depends on.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        weights: PositionWeight,
        chunk_rows: int = 128,
        closed_form: bool = True,
        sampling: SlotSampling | None = None,
    ) -> None:
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        check_names(terms)
        self.terms, self.weights, self.sampling = terms, weights, sampling
        self.chunk_rows, self.closed_form = chunk_rows, closed_form

    def __call__(
        self, hidden: Tensor, blocks: Blocks, teacher: Tensor | None, teacher_offsets: Tensor | None, head: Head
    ) -> StepResult:
        """Mask, weight, walk.

        Args:
            hidden: [N, B, H] drafter states after the final norm; slot 0 has no loss.
            blocks: the N blocks.
            teacher: [T, H] post-norm target states, trajectories packed; None if no term needs the teacher.
            teacher_offsets: [R] int64; position p of trajectory r is row teacher_offsets[r] + p of `teacher`.
            head: states [M, H] -> logits [M, V], the frozen output head of the target.

        Raises:
            NumericalError: logits that are no distribution, naming trajectory, anchor and candidate.
            ValueError: no teacher for a term that needs one, or positions outside `teacher`.
        """
        terms = list(self.terms)
        check_names(terms)
        positions = self._positions(terms, blocks, teacher, teacher_offsets, hidden.device)
        supervised = blocks.supervised.to(hidden.device)
        rows = _gather(hidden, blocks, supervised, positions)
        try:
            walk = Walk(terms, teacher, head, self.chunk_rows, self.closed_form)
            weights = self._weights(supervised, rows, walk)
            return self._sum(hidden, rows, weights, walk, blocks.labels.to(hidden.device))
        except NumericalError as error:
            raise error.at(_place(error.row, blocks)) from None

    def _positions(
        self,
        terms: Sequence[LossTerm],
        blocks: Blocks,
        teacher: Tensor | None,
        offsets: Tensor | None,
        device: torch.device,
    ) -> Tensor | None:
        """Teacher row of every candidate, [N, K]; None where no term asks for the teacher."""
        needing = [term.name for term in terms if term.needs_teacher]
        if not needing:
            return None
        if teacher is None or offsets is None:
            raise ValueError(f"loss terms {needing} need the teacher's states, but there are none")
        rows = offsets.to(blocks.rows.device)[blocks.rows][:, None]
        positions = rows + teacher_positions(blocks.anchors, blocks.supervised.shape[1] + 1)
        used = positions[blocks.supervised]
        if len(used) and (int(used.min()) < 0 or int(used.max()) >= len(teacher)):
            raise ValueError(f"teacher rows {int(used.min())} .. {int(used.max())} wanted, there are {len(teacher)}")
        return positions.to(device)

    def _weights(self, supervised: Tensor, rows: Rows, walk: Walk) -> Tensor:
        """Position weights [N, K], after a gradient-free first pass where they need one."""
        if not self.weights.needs_results:
            return self.weights(supervised)
        chosen, agrees, confidence = walk.first_look(rows)
        results = FirstPass(
            _scatter(supervised, rows.index, chosen, -1),
            _scatter(supervised, rows.index, agrees, False),
            _scatter(supervised, rows.index, confidence, 0.0),
        )
        return self.weights(supervised, results)

    def _sum(self, hidden: Tensor, rows: Rows, weights: Tensor, walk: Walk, labels: Tensor) -> StepResult:
        """Walk the rows that have weight with gradients, and the others for their candidates."""
        total = weights.flatten()[rows.index].sum(dtype=torch.float64)
        for term in walk.all:
            term.begin(float(total))
        inputs = [hidden, *trainable(walk.all)]
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        sampling = self.sampling if learns else None
        weight = (sampling(weights) if sampling else weights).flatten()[rows.index]
        counted = weight > 0 if walk.all else torch.zeros_like(weight, dtype=torch.bool)
        loud, silent = rows.where(counted), rows.where(~counted)
        gradients = [torch.zeros_like(tensor) for tensor in (loud.hidden, *inputs[1:])] if learns else []
        chosen = _scatter(weights, loud.index, walk.run(loud, weight[counted], gradients), -1)
        if sampling:
            silent = silent.where(_reached(chosen, labels).flatten()[silent.index])
        chosen.view(-1)[silent.index] = walk.candidates(silent)
        loss = _attach(walk, inputs if learns else [], gradients, loud.index)
        return StepResult(loss, total.detach(), walk.terms, chosen, walk.shares)


def _reached(chosen: Tensor, labels: Tensor) -> Tensor:
    """[N, K] bool: no known candidate before this one is wrong, so that acceptance may depend on it."""
    wrong = ((chosen >= 0) & (chosen != labels)).long()
    return wrong.cumsum(1) - wrong == 0


def _place(index: int, blocks: Blocks) -> str:
    block, candidate = divmod(index, blocks.supervised.shape[1])
    row, anchor = int(blocks.rows[block]), int(blocks.anchors[block])
    return f"trajectory {row}, anchor {anchor}, candidate {candidate + 1}"


def _gather(hidden: Tensor, blocks: Blocks, supervised: Tensor, positions: Tensor | None) -> Rows:
    """The supervised candidates, those of one teaching position together."""
    index = supervised.flatten().nonzero().squeeze(1)
    if positions is not None:
        index = index[positions.flatten()[index].argsort(stable=True)]
    return Rows(
        index=index,
        hidden=hidden.detach().flatten(0, 1).index_select(0, _slots(index, supervised.shape[1])),
        token=blocks.labels.to(hidden.device).flatten()[index],
        position=None if positions is None else positions.flatten()[index],
    )


def _scatter(like: Tensor, index: Tensor, values: Tensor, fill: float | bool) -> Tensor:
    """[N, K] with values at the flat index and `fill` elsewhere."""
    result = torch.full(like.shape, fill, dtype=values.dtype, device=values.device)
    result.view(-1)[index] = values
    return result


def _attach(walk: Walk, inputs: Sequence[Tensor], gradients: Sequence[Tensor], index: Tensor) -> Tensor:
    """The loss as a scalar that hands the gradients of the walk on to the states and the terms' parameters."""
    loss = torch.zeros((), dtype=torch.float64, device=index.device)
    for term in walk.all:
        loss = loss + term.weight * walk.terms[term.name]
    if not inputs:
        return loss.float()
    states = inputs[0]
    spread = torch.zeros_like(states)
    spread.view(-1, states.shape[-1])[_slots(index, states.shape[1] - 1)] = gradients[0]
    loss = loss.to(states.dtype if states.dtype == torch.float64 else torch.float32)
    attached: Tensor = Attach.apply(loss, len(inputs), *inputs, spread, *gradients[1:])
    return attached


def _slots(index: Tensor, candidates: int) -> Tensor:
    """Row of the flat states [N * B] for candidate n * K + k - 1: slot k of block n."""
    return index + index // candidates + 1
