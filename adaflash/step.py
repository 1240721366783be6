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
from adaflash.losses.chunked import Attach, Head, Rows, Sums, candidates_only, first_look, trainable, walk
from adaflash.losses.numerics import NumericalError
from adaflash.losses.position import FirstPass, PositionWeight
from adaflash.types import Blocks


@dataclass(frozen=True)
class StepResult:
    """Sums over the candidates of one micro-batch."""

    loss: Tensor  # scalar: sum over rows of w * sum over terms of weight * term; differentiable
    weight: Tensor  # scalar float64: sum of w
    terms: dict[str, Tensor]  # name -> sum of w * term, detached float64
    candidates: Tensor  # [N, K] int64: the drafter's argmax where supervised, -1 elsewhere
    stats: dict[str, Tensor]  # "{term}/{share}" -> [2] float64: numerator and denominator


class DraftStep:
    """Loss of drafted blocks under a list of terms.

    Args:
        terms: what is summed; the list is kept, so that terms added to it later count too.
        weights: how much each candidate of a block counts.
        chunk_rows: rows whose logits exist at one time.
    """

    def __init__(self, terms: Sequence[LossTerm], weights: PositionWeight, chunk_rows: int = 256) -> None:
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        check_names(terms)
        self.terms, self.weights, self.chunk_rows = terms, weights, chunk_rows

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
            weights = self._weights(supervised, rows, teacher, head).to(hidden.device)
            return self._walk(hidden, rows, weights, terms, teacher, head)
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
        if len(used) and not (0 <= int(used.min()) and int(used.max()) < len(teacher)):
            raise ValueError(f"teacher rows {int(used.min())} .. {int(used.max())} wanted, there are {len(teacher)}")
        return positions.to(device)

    def _weights(self, supervised: Tensor, rows: Rows, teacher: Tensor | None, head: Head) -> Tensor:
        """Position weights [N, K], after a gradient-free first pass where they need one."""
        if not self.weights.needs_results:
            return self.weights(supervised)
        chosen, agrees, confidence = first_look(rows, teacher, head, self.chunk_rows)
        results = FirstPass(
            _scatter(supervised, rows.index, chosen, -1),
            _scatter(supervised, rows.index, agrees, False),
            _scatter(supervised, rows.index, confidence, 0.0),
        )
        return self.weights(supervised, results)

    def _walk(
        self, hidden: Tensor, rows: Rows, weights: Tensor, terms: list[LossTerm], teacher: Tensor | None, head: Head
    ) -> StepResult:
        weight = weights.flatten()[rows.index]
        total = weight.sum(dtype=torch.float64)
        for term in terms:
            term.begin(float(total))
        counted = weight > 0 if terms else torch.zeros_like(weight, dtype=torch.bool)
        loud, silent = rows.where(counted), rows.where(~counted)
        inputs = [hidden, *trainable(terms)]
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            inputs = []
        gradients = [torch.zeros_like(tensor) for tensor in (loud.hidden, *inputs[1:])] if inputs else []
        sums, candidates = walk(loud, weight[counted], terms, teacher, head, self.chunk_rows, gradients)
        chosen = _scatter(weights, loud.index, candidates, -1)
        chosen.view(-1)[silent.index] = candidates_only(silent, head, self.chunk_rows)
        loss = _attach(sums, terms, inputs, gradients, loud.index)
        return StepResult(loss, total.detach(), sums.terms, chosen, dict(sums.shares))


def _place(index: int, blocks: Blocks) -> str:
    block, candidate = divmod(index, blocks.supervised.shape[1])
    row, anchor = int(blocks.rows[block]), int(blocks.anchors[block])
    return f"trajectory {row}, anchor {anchor}, candidate {candidate + 1}"


def _gather(hidden: Tensor, blocks: Blocks, supervised: Tensor, positions: Tensor | None) -> Rows:
    """The supervised candidates, those of one teaching position together."""
    index = supervised.flatten().nonzero().squeeze(1)
    if positions is not None:
        index = index[positions.flatten()[index].argsort(stable=True)]
    candidates = supervised.shape[1]
    slots = index + index // candidates + 1  # candidate k of block n is slot k, row n * B + k of the flat states
    return Rows(
        index=index,
        hidden=hidden.detach().flatten(0, 1).index_select(0, slots),
        token=blocks.labels.to(hidden.device).flatten()[index],
        position=None if positions is None else positions.flatten()[index],
    )


def _scatter(like: Tensor, index: Tensor, values: Tensor, fill: float | bool) -> Tensor:
    """[N, K] with values at the flat index and `fill` elsewhere."""
    result = torch.full(like.shape, fill, dtype=values.dtype, device=values.device)
    result.view(-1)[index] = values
    return result


def _attach(
    sums: Sums, terms: Sequence[LossTerm], inputs: Sequence[Tensor], gradients: Sequence[Tensor], index: Tensor
) -> Tensor:
    """The loss as a scalar that hands the gradients of the walk on to the states and the terms' parameters."""
    values = [term.weight * sums.terms[term.name] for term in terms]
    loss = torch.stack(values).sum() if values else torch.zeros((), dtype=torch.float64, device=index.device)
    if not inputs:
        return loss.float()
    states = inputs[0]
    spread = torch.zeros_like(states)
    candidates = states.shape[1] - 1
    spread.view(-1, states.shape[-1])[index + index // candidates + 1] = gradients[0]
    loss = loss.to(states.dtype if states.dtype == torch.float64 else torch.float32)
    attached: Tensor = Attach.apply(loss, len(inputs), *inputs, spread, *gradients[1:])
    return attached
