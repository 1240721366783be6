"""The vocabulary pass in chunks of rows: values, gradients and candidates, never more than one chunk of logits.

The gradient with respect to the drafter's states is taken chunk by chunk, while the logits exist. Terms with a closed
form share one set of passes (`closed_form.py`); all others are differentiated by autograd, one chunk at a time, and
need not know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from adaflash.losses.attach import trainable
from adaflash.losses.base import Evaluation, LossTerm
from adaflash.losses.closed_form import Mixture, split
from adaflash.losses.numerics import argmax_rows, check_rows, log_probs
from adaflash.losses.rows import Rows
from adaflash.losses.teach import Head, Law, Taught, teach
from adaflash.losses.workspace import Workspace
from adaflash.vocabulary import DraftHead


class Walk:
    """One pass over the rows of a micro-batch; what it finds is added up in its attributes.

    Args:
        terms: what is summed.
        teacher: [T, H] states of the target, or None.
        head: states [M, H] -> logits [M, V], the target's.
        size: N * K, the candidates that `Rows.index` counts.
        limit: rows (and positions) whose logits exist at one time.
        closed_form: False to differentiate every term by autograd (slower; the oracle of the closed forms).
        law: what the target samples from, to find the survival of each candidate.
        drafted: the drafter's own head, where it has fewer tokens than the target. The mixture then walks through those
            alone, and other terms see logits of -inf at all others.
    """

    def __init__(
        self,
        terms: Sequence[LossTerm],
        teacher: Tensor | None,
        head: Head,
        size: int,
        limit: int,
        closed_form: bool = True,
        law: Law | None = None,
        device: torch.device | None = None,
        drafted: DraftHead | None = None,
    ) -> None:
        self.all, self.teacher, self.head, self.limit, self.law = list(terms), teacher, head, limit, law
        self.drafted = drafted or DraftHead(head)
        self.work = Workspace()
        closed, self.rest = split(self.all) if closed_form else ([], self.all)
        self.mixture = Mixture(closed, self.work, self.drafted) if closed else None
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.terms = {term.name: zero for term in self.all}
        self.shares = {f"{term.name}/{share}": zero.new_zeros(2) for term in self.all for share in term.share_names}
        self.candidates = torch.full((size,), -1, dtype=torch.int64, device=device)  # the drafter's argmax
        self.survival = torch.zeros(size, device=device)  # chance that the target samples it itself

    def run(self, rows: Rows, weight: Tensor, gradients: Sequence[Tensor]) -> None:
        """Walk rows that have a weight [M].

        `gradients` are buffers: [M, H] is filled with those of the states, and one per trainable parameter of the
        terms is added to; empty to compute values only.
        """
        for group, first, taught in self._groups(rows):
            for start, end in group.chunks(self.limit):
                part, span = group.part(start, end), slice(first + start, first + end)
                some = None if taught is None else taught.rows(start, end)
                slices = [gradients[0][span], *gradients[1:]] if gradients else []
                with part.located():
                    self._found(part, some, self._chunk(part, weight[span], some, slices))

    @torch.no_grad()
    def look(self, rows: Rows) -> None:
        """Find the candidates of rows, and nothing else."""
        if self.law is None:
            rows = replace(rows, position=None)
        for group, _, taught in self._groups(rows):
            for start, end in group.chunks(self.limit):
                part = group.part(start, end)
                logits = self.drafted(part.hidden)
                with part.located():
                    chosen = self._argmax(logits)
                self._found(part, None if taught is None else taught.rows(start, end), chosen)

    def _groups(self, rows: Rows) -> Iterator[tuple[Rows, int, Taught | None]]:
        """Runs of rows, where they begin, and their teacher."""
        for first, last in rows.groups(self.limit):
            group = rows.part(first, last)
            with group.located():
                taught = self._teach(group)
            yield group, first, taught

    def _teach(self, rows: Rows) -> Taught | None:
        if rows.position is None or self.teacher is None:
            return None
        spread, limit = (self.mixture.spread, self.mixture.limit) if self.mixture else (False, inf)
        said = self.drafted.vocabulary
        return teach(rows.position, self.teacher, self.head, self.work, spread, bool(self.rest), self.law, said, limit)

    def _found(self, rows: Rows, taught: Taught | None, chosen: Tensor) -> None:
        self.candidates[rows.index] = chosen
        if taught is not None:
            self.survival[rows.index] = taught.survival(chosen)

    def _argmax(self, logits: Tensor) -> Tensor:
        """Candidates [M] of logits [M, V], which are checked."""
        found = self.work.map(lambda _, rows: argmax_rows(logits[rows]), logits)
        if not all(top.isfinite().all() for top, _ in found):
            check_rows(logits, "student logits")
        return self.drafted.ids(torch.cat([chosen for _, chosen in found]))

    def _chunk(self, rows: Rows, weight: Tensor, taught: Taught | None, gradients: Sequence[Tensor]) -> Tensor:
        """Head forward, terms, head backward."""
        with torch.set_grad_enabled(bool(gradients)):
            states = rows.hidden.detach().requires_grad_(bool(gradients))
            logits = self.drafted(states)
        student = logits.detach()
        pull = self.work.gradient(student) if gradients else None
        found = self.mixture(student, rows.token, weight, taught, pull) if self.mixture else None
        rest = self.all if found is None else self.rest  # no distribution, or no closed form: the plain way
        if found is not None:
            chosen = found[0]
            for name, result in found[1].items():
                self._count(name, result, weight)
        else:
            chosen = self._argmax(student)
        if rest:
            self._plain(rest, student, rows.token, weight, taught, pull, gradients[1:], found is not None)
        if pull is not None:
            gradients[0].copy_(torch.autograd.grad(logits, states, pull)[0])
        return chosen

    def _plain(
        self,
        terms: Sequence[LossTerm],
        student: Tensor,
        token: Tensor,
        weight: Tensor,
        taught: Taught | None,
        pull: Tensor | None,
        parameters: Sequence[Tensor],
        keep: bool,
    ) -> None:
        """Terms by autograd: their gradient is added to `pull` (which it replaces unless `keep`) and `parameters`."""
        teacher = None if taught is None else taught.expanded()
        leaf = student.requires_grad_(pull is not None)
        with torch.set_grad_enabled(pull is not None):
            total, wide = torch.zeros((), device=weight.device), self.drafted.widen(leaf)
            for term in terms:
                result = term.evaluate(wide, teacher, token)  # type: ignore[arg-type]  # None where not needed
                total = total + term.weight * self._count(term.name, result, weight)
        if pull is None:
            return
        found = torch.autograd.grad(total, [leaf, *trainable(terms)], allow_unused=True)
        if not keep:
            pull.zero_()
        for buffer, grad in zip([pull, *parameters], found, strict=True):
            if grad is not None:
                buffer += grad

    def _count(self, name: str, result: Evaluation, weight: Tensor) -> Tensor:
        """The weighted sum of one term over a chunk, differentiable; it and the shares are added up."""
        if result.values.shape != weight.shape:
            shape = list(result.values.shape)
            raise ValueError(f"loss term {name!r} must give one value per row, {list(weight.shape)}, got {shape}")
        total = (weight * result.values).sum()
        self.terms[name] = self.terms[name] + total.detach().double()
        for share, pair in result.shares.items():
            sums = torch.stack([(weight * part).sum(dtype=torch.float64) for part in pair])
            if f"{name}/{share}" not in self.shares:
                raise ValueError(f"loss term {name!r} gives a share {share!r} that its `share_names` do not declare")
            self.shares[f"{name}/{share}"] = self.shares[f"{name}/{share}"] + sums
        return total

    @torch.no_grad()
    def first_look(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates [M], whether they are the right token, and the drafter's probability of the right token.

        Right is the teacher's choice, or the data token where there is no teacher.
        """
        parts = [(rows.index[:0], rows.index[:0].bool(), torch.empty(0, device=rows.index.device))]
        for start, end in rows.chunks(self.limit):
            part = rows.part(start, end)
            with part.located():
                taught = self._teach(part)
                right = part.token if taught is None else taught.choice
                student = log_probs(self.drafted(part.hidden), "student logits")
            chosen, place = self.drafted.ids(student.argmax(-1)), self.drafted.places(right)
            confidence = student.gather(-1, place.clamp(min=0)[:, None]).squeeze(-1).exp() * (place >= 0)
            parts.append((chosen, chosen == right, confidence.float()))
        chosen, agrees, confidence = (torch.cat(column) for column in zip(*parts, strict=True))
        return chosen, agrees, confidence
