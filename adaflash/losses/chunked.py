"""The vocabulary pass in chunks of rows: values, gradients and candidates, never more than one chunk of logits.

M rows are candidates in walking order: those taught by one position stand together, so that its teacher logits are
computed once. The gradient with respect to the drafter's states is taken chunk by chunk while the logits exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adaflash.losses.base import LossTerm
from adaflash.losses.divergences import teacher_choice
from adaflash.losses.numerics import NumericalError, check_rows, log_probs

Head = Callable[[Tensor], Tensor]


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

    @contextmanager
    def located(self) -> Iterator[None]:
        """A `NumericalError` from within counts rows of this chunk: let it count candidates of the batch."""
        try:
            yield
        except NumericalError as error:
            raise NumericalError(error.what, int(self.index[error.row]), error.problem) from None


@dataclass
class Sums:
    """What the walk adds up, all detached and in float64."""

    terms: dict[str, Tensor]
    shares: dict[str, Tensor] = field(default_factory=lambda: defaultdict(lambda: torch.zeros(2, dtype=torch.float64)))


def bounds(rows: Rows, limit: int) -> Iterator[tuple[int, int]]:
    """Chunks of at most `limit` rows, cut between positions unless one position alone has more rows than that."""
    if rows.position is None:
        yield from ((start, min(start + limit, len(rows))) for start in range(0, len(rows), limit))
        return
    start = end = 0
    for count in rows.position.unique_consecutive(return_counts=True)[1].tolist():
        if end > start and end + count - start > limit:
            yield start, end
            start = end
        end += count
        while end - start > limit:
            yield start, start + limit
            start += limit
    if end > start:
        yield start, end


@torch.no_grad()
def teacher_logits(rows: Rows, teacher: Tensor | None, head: Head) -> Tensor | None:
    """Teacher logits [M, V]: the head is run once per position. Never requires grad."""
    if rows.position is None or teacher is None:
        return None
    positions, back = rows.position.unique_consecutive(return_inverse=True)
    logits = head(teacher.index_select(0, positions)).detach()
    return logits if len(positions) == len(back) else logits.index_select(0, back)


def walk(
    rows: Rows,
    weight: Tensor,
    terms: Sequence[LossTerm],
    teacher: Tensor | None,
    head: Head,
    limit: int,
    gradients: Sequence[Tensor],
) -> tuple[Sums, Tensor]:
    """Sums over all rows and the drafter's candidates [M].

    `gradients` are buffers that the walk adds to: one [M, H] for the states and one per trainable parameter of the
    terms; empty to compute values only.
    """
    sums = Sums({term.name: torch.zeros((), dtype=torch.float64, device=weight.device) for term in terms})
    candidates = torch.empty_like(rows.index)
    for start, end in bounds(rows, limit):
        part = rows.part(start, end)
        slices = [gradients[0][start:end], *gradients[1:]] if gradients else []
        with part.located():
            logits = teacher_logits(part, teacher, head)
            candidates[start:end] = _chunk(part, weight[start:end], terms, logits, head, sums, slices)
    return sums, candidates


def _chunk(
    rows: Rows,
    weight: Tensor,
    terms: Sequence[LossTerm],
    teacher: Tensor | None,
    head: Head,
    sums: Sums,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Add one chunk to `sums` and `gradients`; its candidates."""
    with torch.set_grad_enabled(bool(gradients)):
        states = rows.hidden.detach().requires_grad_(bool(gradients))
        student = head(states)
        total = student.new_zeros((), dtype=torch.float32)
        for term in terms:
            total = total + term.weight * _add_term(term, student, teacher, rows.token, weight, sums)
    if gradients:
        inputs = [states, *trainable(terms)]
        for buffer, grad in zip(gradients, torch.autograd.grad(total, inputs, allow_unused=True), strict=True):
            if grad is not None:
                buffer += grad
    return student.detach().argmax(-1)


def _add_term(
    term: LossTerm, student: Tensor, teacher: Tensor | None, token: Tensor, weight: Tensor, sums: Sums
) -> Tensor:
    """The weighted sum of one term over a chunk, differentiable; its parts go to `sums`."""
    result = term.evaluate(student, teacher, token)  # type: ignore[arg-type]  # None only where not needed
    if result.values.shape != weight.shape:
        shape = list(result.values.shape)
        raise ValueError(f"loss term {term.name!r} must give one value per row, {list(weight.shape)}, got {shape}")
    total = (weight * result.values).sum()
    sums.terms[term.name] += total.detach().double()
    for share, (top, bottom) in result.shares.items():
        pair = torch.stack([(weight * top).sum(), (weight * bottom).sum()])
        sums.shares[f"{term.name}/{share}"] = sums.shares[f"{term.name}/{share}"].to(pair.device) + pair.double()
    return total


@torch.no_grad()
def candidates_only(rows: Rows, head: Head, limit: int) -> Tensor:
    """The drafter's argmax [M], without gradients."""
    candidates = torch.empty_like(rows.index)
    for start in range(0, len(rows), limit):
        part = rows.part(start, min(start + limit, len(rows)))
        logits = head(part.hidden)
        with part.located():
            check_rows(logits, "student logits")
        candidates[start : start + limit] = logits.argmax(-1)
    return candidates


@torch.no_grad()
def first_look(rows: Rows, teacher: Tensor | None, head: Head, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates [M], whether they are the right token, and the drafter's probability of the right token.

    Right is the teacher's choice, or the data token where there is no teacher.
    """
    parts = []
    for start, end in bounds(rows, limit):
        part = rows.part(start, end)
        with part.located():
            taught = teacher_logits(part, teacher, head)
            right = part.token if taught is None else teacher_choice(taught)
            student = log_probs(head(part.hidden), "student logits")
        chosen = student.argmax(-1)
        parts.append((chosen, chosen == right, student.gather(-1, right[:, None]).squeeze(-1).exp()))
    if not parts:
        none = rows.index.new_empty(0)
        return none, none.bool(), none.float()
    chosen, agrees, confidence = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, agrees, confidence


def trainable(terms: Sequence[LossTerm]) -> list[nn.Parameter]:
    """Parameters of the terms that learn."""
    return [parameter for term in terms for parameter in term.parameters() if parameter.requires_grad]


class Attach(torch.autograd.Function):
    """A loss whose gradients are known already: hands them on, times what comes from above.

    apply(loss, n, *inputs[n], *gradients[n]) -> loss.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """The loss itself; the gradients wait for `backward`."""
        ctx.save_for_backward(*tensors[count:])
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """upstream * gradient for every input."""
        gradients = ctx.saved_tensors
        return None, None, *(upstream.to(grad.dtype) * grad for grad in gradients), *(None for _ in gradients)
