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

from adaflash.blocks import agreeing_prefix, teacher_positions
from adaflash.losses.attach import attach, trainable
from adaflash.losses.base import LossTerm, check_names
from adaflash.losses.chunked import Walk
from adaflash.losses.numerics import NumericalError
from adaflash.losses.position import FirstPass, PositionWeight
from adaflash.losses.rows import Rows
from adaflash.losses.sampling import SlotSampling
from adaflash.losses.teach import Head, Law
from adaflash.types import Blocks
from adaflash.vocabulary import DraftHead


@dataclass(frozen=True)
class StepResult:
    """Sums over the candidates of one micro-batch."""

    loss: Tensor  # scalar: sum over rows of w * sum over terms of weight * term; differentiable
    weight: Tensor  # scalar float64: sum of w
    terms: dict[str, Tensor]  # name -> sum of w * term, detached float64
    candidates: Tensor  # [N, K] int64: the drafter's argmax where supervised (see `sampling`), -1 elsewhere
    stats: dict[str, Tensor]  # "{term}/{share}" -> [2] float64: numerator and denominator
    survival: Tensor | None = None  # [N, K] with a `law`: chance that the target samples the candidate itself

    def sums(self) -> dict[str, Tensor]:
        """For the log: the weight, every term's sum, and shares as pairs (numerator, denominator)."""
        terms = {f"loss/{name}": value for name, value in self.terms.items()}
        return {"weight": self.weight, **terms, **{f"share/{name}": value for name, value in self.stats.items()}}


class DraftStep:
    """Loss of drafted blocks under a list of terms.

    Args:
        terms: what is summed; the list is kept, so that terms added to it later count too.
        weights: how much each candidate of a block counts.
        chunk_rows: rows whose logits exist at one time.
        closed_form: False to take every gradient by autograd (slower; the oracle of the closed forms).
        sampling: differentiate a sample of the candidates only, unbiased. Of the others a candidate is computed only
            where no kept one before it is wrong already (-1 elsewhere), which is all that acceptance depends on.
        law: logits [M, V] -> the probabilities the target samples from, after temperature and filters; gives the
            survival of each candidate, which labels acceptance when rollouts are sampled.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        weights: PositionWeight,
        chunk_rows: int = 192,
        closed_form: bool = True,
        sampling: SlotSampling | None = None,
        law: Law | None = None,
    ) -> None:
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        check_names(terms)
        self.terms, self.weights, self.sampling, self.law = terms, weights, sampling, law
        self.chunk_rows, self.closed_form = chunk_rows, closed_form

    def __call__(
        self,
        hidden: Tensor,
        blocks: Blocks,
        teacher: Tensor | None,
        teacher_offsets: Tensor | None,
        head: Head,
        chance: torch.Generator | None = None,
        drafted: DraftHead | None = None,
    ) -> StepResult:
        """Mask, weight, walk.

        Args:
            hidden: [N, B, H] drafter states after the final norm; slot 0 has no loss.
            blocks: the N blocks.
            teacher: [T, H] post-norm target states, trajectories packed; None if no term needs the teacher.
            teacher_offsets: [N] int64; position p is for block n row teacher_offsets[n] + p of `teacher`.
            head: states [M, H] -> logits [M, V], the frozen output head of the target.
            chance: of sampled slots.
            drafted: states -> logits [M, n] of a drafter that can say n of the V tokens; None: it has all of them.

        Raises:
            NumericalError: logits that are no distribution, naming trajectory, anchor and candidate.
            ValueError: no teacher for a term that needs one, or positions outside `teacher`.
        """
        terms = list(self.terms)
        check_names(terms)
        rows = self._rows(terms, hidden, blocks, teacher, teacher_offsets)
        walk = self._walk(terms, hidden, blocks, teacher, head, drafted)
        try:
            return self._sum(hidden, rows, self._weights(blocks, rows, walk), walk, blocks, self.sampling, chance)
        except NumericalError as error:
            raise error.at(_place(error.row, blocks)) from None

    def gradient_norms(
        self,
        hidden: Tensor,
        blocks: Blocks,
        teacher: Tensor | None,
        teacher_offsets: Tensor | None,
        head: Head,
        drafted: DraftHead | None = None,
    ) -> dict[str, Tensor]:
        """Squared norm of the gradient that each weighted term causes alone in the drafter's states, of all candidates.

        For the log, on request: it costs one walk a term. Arguments as for the step itself. Squares of micro-batches add
        up; the root over the sum of weights is the norm. By the name `grad_norm/loss/{term}`, float64.
        """
        terms, states = list(self.terms), hidden.detach().requires_grad_()
        rows = self._rows(terms, states, blocks, teacher, teacher_offsets)
        weights = self._weights(blocks, rows, self._walk(terms, states, blocks, teacher, head, drafted))
        norms = {}
        for term in terms:
            walk = self._walk([term], states, blocks, teacher, head, drafted)
            result = self._sum(states, rows, weights, walk, blocks)
            (gradient,) = torch.autograd.grad(result.loss, states)
            norms[f"grad_norm/loss/{term.name}"] = gradient.double().square().sum()
        return norms

    def _walk(
        self,
        terms: Sequence[LossTerm],
        hidden: Tensor,
        blocks: Blocks,
        teacher: Tensor | None,
        head: Head,
        drafted: DraftHead | None,
    ) -> Walk:
        size = blocks.supervised.numel()
        return Walk(terms, teacher, head, size, self.chunk_rows, self.closed_form, self.law, hidden.device, drafted)

    def _rows(
        self,
        terms: Sequence[LossTerm],
        hidden: Tensor,
        blocks: Blocks,
        teacher: Tensor | None,
        offsets: Tensor | None,
    ) -> Rows:
        """The supervised candidates in walking order."""
        positions = self._positions(terms, blocks, teacher, offsets)
        where = hidden.device
        return Rows.gather(
            hidden,
            blocks.labels.to(where),
            blocks.supervised.to(where),
            None if positions is None else positions.to(where),
        )

    def _positions(
        self, terms: Sequence[LossTerm], blocks: Blocks, teacher: Tensor | None, offsets: Tensor | None
    ) -> Tensor | None:
        """Teacher row of every candidate, [N, K]; None where nothing asks for the teacher."""
        needing = [term.name for term in terms if term.needs_teacher] + (["law"] if self.law else [])
        if not needing:
            return None
        if teacher is None or offsets is None:
            raise ValueError(f"loss terms {needing} need the teacher's states, but there are none")
        rows = offsets.to(blocks.anchors.device)[:, None]
        positions = rows + teacher_positions(blocks.anchors, blocks.supervised.shape[1] + 1)
        used = positions[blocks.supervised]
        if len(used) and (int(used.min()) < 0 or int(used.max()) >= len(teacher)):
            raise ValueError(f"teacher rows {int(used.min())} .. {int(used.max())} wanted, there are {len(teacher)}")
        return positions

    def _weights(self, blocks: Blocks, rows: Rows, walk: Walk) -> Tensor:
        """Position weights [N, K], after a gradient-free first pass where they need one."""
        supervised = blocks.supervised.to(rows.index.device)
        if not self.weights.needs_results:
            return self.weights(supervised)
        chosen, agrees, confidence = walk.first_look(rows)
        results = FirstPass(
            _scatter(supervised, rows.index, chosen, -1),
            _scatter(supervised, rows.index, agrees, False),
            _scatter(supervised, rows.index, confidence, 0.0),
        )
        return self.weights(supervised, results)

    def _sum(
        self,
        hidden: Tensor,
        rows: Rows,
        weights: Tensor,
        walk: Walk,
        blocks: Blocks,
        sampling: SlotSampling | None = None,
        chance: torch.Generator | None = None,
    ) -> StepResult:
        """Walk the rows that have weight with gradients, and look at the others for their candidates."""
        total = weights.flatten()[rows.index].sum(dtype=torch.float64)
        for term in walk.all:
            term.begin(float(total))
        inputs = [hidden, *trainable(walk.all)]
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        sampling = sampling if learns else None
        weight = (sampling(weights, chance) if sampling else weights).flatten()[rows.index]
        counted = weight > 0 if walk.all else torch.zeros_like(weight, dtype=torch.bool)
        loud, silent = rows.where(counted), rows.where(~counted)
        gradients = [torch.zeros_like(tensor) for tensor in (loud.hidden, *inputs[1:])] if learns else []
        walk.run(loud, weight[counted], gradients)
        if sampling:
            reached = _reached(walk.candidates.view_as(weights), blocks.labels.to(weights.device))
            silent = silent.where(reached.flatten()[silent.index])
        walk.look(silent)
        loss = attach(_total(walk), inputs if learns else [], gradients, loud.index)
        survival = walk.survival.view_as(weights) if self.law else None
        candidates = walk.candidates.view_as(weights)
        return StepResult(loss, total.detach(), walk.terms, candidates, _with_parts(walk), survival)


def acceptance(result: StepResult, blocks: Blocks) -> Tensor:
    """Accepted candidates of each whole block, a float [N]: counted where the target is greedy, else to be expected."""
    if result.survival is None:
        return agreeing_prefix(result.candidates, blocks.labels, blocks.supervised).float()
    return expected_acceptance(result.candidates, result.survival, blocks.labels, blocks.supervised)


def expected_acceptance(candidates: Tensor, survival: Tensor, labels: Tensor, supervised: Tensor) -> Tensor:
    """Accepted candidates of a whole block to be expected when the target samples, [N] from [N, K] each.

    sum_k (prod_{j < k} [d_j is the token at a + j]) p_k(d_k): unbiased over trajectories (DESIGN section 4), since the
    trajectory's own token stands for the target's draw at every position but the last that counts.
    """
    right = ((candidates == labels) & supervised).to(survival.dtype)
    reached = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1).cumprod(1)
    return (reached * survival * supervised).sum(1)


def _reached(chosen: Tensor, labels: Tensor) -> Tensor:
    """[N, K] bool: no candidate known so far is wrong up to here, so that acceptance may depend on one unknown."""
    return ((chosen >= 0) & (chosen != labels)).cumsum(1) == 0


def _place(index: int, blocks: Blocks) -> str:
    block, candidate = divmod(index, blocks.supervised.shape[1])
    row, anchor = int(blocks.rows[block]), int(blocks.anchors[block])
    return f"trajectory {row}, anchor {anchor}, candidate {candidate + 1}"


def _scatter(like: Tensor, index: Tensor, values: Tensor, fill: float | bool) -> Tensor:
    """[N, K] with values at the flat index and `fill` elsewhere."""
    result = torch.full(like.shape, fill, dtype=values.dtype, device=values.device)
    result.view(-1)[index] = values
    return result


def _total(walk: Walk) -> Tensor:
    parts = [term.weight * walk.terms[term.name] for term in walk.all]
    return sum(parts, walk.survival.new_zeros((), dtype=torch.float64))


def _with_parts(walk: Walk) -> dict[str, Tensor]:
    """The shares that terms give, and each term's part of the loss."""
    total = _total(walk)
    parts = {f"{t.name}/of_loss": torch.stack([t.weight * walk.terms[t.name], total]) for t in walk.all}
    return {**walk.shares, **parts}
