"""The shipped mixtures with their gradients in closed form: few passes, in place, nothing kept for autograd.

For a row with student p = softmax(s), teacher q, r = log p - log q, and c_v = 1 where entry v was not clipped:

    cross-entropy on y     -log p_y                    gradient  p - [v = y]
    forward KL             sum q (log q - log p)       gradient  p - q
    reverse KL, clipped    sum d_v, see divergences    gradient  p (c r - sum_v c p r)

(d_v = p r - p + q has the derivative r with respect to p.) So every mixture is one of p r, p and q with a factor per
row, less the targets. `terms.py` under autograd is the oracle.

Where the drafter can say n < V tokens, v runs over those; q keeps the probabilities of the whole vocabulary. At all others
p = 0 and d_v = q_v: constants, which come with the teacher. A target that cannot be said counts zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from adaflash.losses.base import Evaluation, LossTerm
from adaflash.losses.numerics import argmax_rows, below_top, working
from adaflash.losses.teach import Taught
from adaflash.losses.terms import ForwardKL, ReverseKL, TeacherCrossEntropy, TokenCrossEntropy
from adaflash.losses.workspace import Buffers, Workspace
from adaflash.vocabulary import WHOLE, DraftHead

KNOWN = (TeacherCrossEntropy, TokenCrossEntropy, ForwardKL, ReverseKL)


def split(terms: Sequence[LossTerm]) -> tuple[list[LossTerm], list[LossTerm]]:
    """Terms with a closed form, one of each kind, and the others (subclass, temperature, top-k, a second of a kind)."""
    closed: list[LossTerm] = []
    rest: list[LossTerm] = []
    for term in terms:
        fits = type(term) in KNOWN and getattr(term, "temperature", 1.0) == 1.0 and not getattr(term, "top_k", 0)
        fits = fits and type(term) not in map(type, closed)
        (closed if fits else rest).append(term)
    return closed, rest


class Mixture:
    """At most one term of each kind that has a closed form."""

    def __init__(self, terms: Sequence[LossTerm], work: Workspace, drafted: DraftHead = WHOLE) -> None:
        self.work, self.drafted = work, drafted
        kinds = {type(term): term for term in terms}
        self.forward, self.reverse = kinds.get(ForwardKL), kinds.get(ReverseKL)
        self.teacher_ce, self.token_ce = kinds.get(TeacherCrossEntropy), kinds.get(TokenCrossEntropy)
        self.spread = bool(self.forward or self.reverse)  # a term looks at the teacher's whole distribution

    @property
    def limit(self) -> float:
        """What entries of the vocabulary are clipped to."""
        reverse = self.reverse
        return reverse.limit if isinstance(reverse, ReverseKL) and reverse.clip == "entry" else inf

    def __call__(
        self, student: Tensor, token: Tensor, weight: Tensor, taught: Taught | None, gradient: Tensor | None
    ) -> tuple[Tensor, dict[str, Evaluation]] | None:
        """Candidates [M] and the terms by name; `gradient` [M, n] becomes that of the weighted sum over terms.

        Returns None where a row is no distribution: the plain way names it.
        """

        def tile(worker: int, rows: slice) -> list[Tensor]:
            some = None if taught is None else taught.rows(rows.start, rows.stop)
            into = None if gradient is None else gradient[rows]
            buffers = self.work.tile(worker, student[rows])
            return self._tile(student[rows], token[rows], weight[rows], some, into, buffers)

        parts = self.work.map(tile, student)
        chosen, total, *columns = (torch.cat(column) for column in zip(*parts, strict=True))
        if not total.isfinite().all():
            return None
        said = self.drafted.vocabulary
        return self.drafted.ids(chosen), self._named(columns, student.shape[1] if said is None else len(said.place))

    def _named(self, columns: list[Tensor], vocabulary: int) -> dict[str, Evaluation]:
        """The columns of `_tile` by the names of their terms."""
        present = [term for term in (self.teacher_ce, self.token_ce, self.forward, self.reverse) if term]
        found = {term.name: Evaluation(column) for term, column in zip(present, columns, strict=False)}
        if isinstance(self.reverse, ReverseKL):
            value, whole, cut = columns[-3:]
            out_of = torch.full_like(value, vocabulary if self.reverse.clip == "entry" else 1)
            shares = {"removed": (whole - value, whole), "cut": (cut, out_of)}
            found[self.reverse.name] = Evaluation(value, shares)
        return found

    def _tile(
        self,
        student: Tensor,
        token: Tensor,
        weight: Tensor,
        taught: Taught | None,
        gradient: Tensor | None,
        buffers: Buffers,
    ) -> list[Tensor]:
        """Every term on a few rows that stay in the cache: [candidates, sum of exponentials, values ...]."""
        r, p, spare = buffers
        top, chosen = argmax_rows(student)
        total = torch.exp(below_top(student, top, r), out=p).sum(-1)
        p.mul_(total.reciprocal()[:, None])
        columns, pull, steep = [chosen, total], torch.zeros_like(total), None
        targets = self._targets(student, token, taught)
        for factor, target, can in targets:
            columns.append((total.log() - r.gather(1, target[:, None]).squeeze(1)) * can)
            pull += factor * can
        if taught is not None and self.spread:
            r.sub_(total.log()[:, None])
            add_rows(r, taught.log_q, taught.back, -1.0)  # r = log p - log q
            if self.forward:
                columns.append(-dot_rows(r, taught.q, taught.back).clamp(max=0))
                pull += self.forward.weight
            if isinstance(self.reverse, ReverseKL):
                value, whole, cut, kept = _reverse(self.reverse, r, p, spare, taught)  # r = c p r
                columns += [value, whole, cut]
                steep = self.reverse.weight * kept
                pull -= steep * r.sum(-1)
        if gradient is None:
            return columns
        into = gradient if gradient.dtype == r.dtype else spare
        if steep is None:
            torch.mul(p, (pull * weight)[:, None], out=into)
        else:
            torch.mul(r, (steep * weight)[:, None], out=into).addcmul_(p, (pull * weight)[:, None])
        if self.forward and taught is not None:
            add_rows(into, taught.q, taught.back, -self.forward.weight * weight)
        for factor, target, can in targets:
            into[torch.arange(len(target), device=target.device), target] -= factor * can * weight
        if into is not gradient:
            gradient.copy_(into)
        return columns

    def _targets(self, student: Tensor, token: Tensor, taught: Taught | None) -> list[tuple[float, Tensor, Tensor]]:
        """Of each cross-entropy its weight, the places [M] of its tokens, and 1 for those that can be said, else 0."""
        wanted = [(self.teacher_ce.weight, taught.choice)] if self.teacher_ce and taught else []
        wanted += [(self.token_ce.weight, token)] if self.token_ce else []
        found = []
        for factor, ids in wanted:
            places = self.drafted.places(ids)
            at = places.clamp(min=0)
            can = (places >= 0) & (student.gather(1, at[:, None]).squeeze(1) > -inf)
            found.append((factor, at, working(can.to(student.dtype))))
        return found


def _reverse(
    term: ReverseKL, r: Tensor, p: Tensor, spare: Tensor, taught: Taught
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clipped value, whole value, what was cut, and 1 for each row whose gradient lives. r becomes c p r."""
    limit = term.limit
    r.mul_(p)
    if term.clip != "entry":
        whole = r.sum(-1).clamp(min=0)
        kept = (whole <= limit).to(whole)
        return whole.clamp(max=limit), whole, 1 - kept, kept
    torch.sub(r, p, out=spare)
    add_rows(spare, taught.q, taught.back, 1.0)  # d = p r - p + q
    whole = spare.sum(-1).clamp(min=0)
    value = spare.clamp_(0, limit).sum(-1)
    uncut = torch.lt(spare, limit, out=spare)  # as numbers: a float mask is seven times faster than a bool one
    r.mul_(uncut)
    cut = spare.shape[1] - uncut.sum(-1)
    if taught.beyond is not None:
        mass, clipped, more = taught.beyond[taught.back].unbind(1)
        whole, value, cut = whole + mass, value + clipped, cut + more
    return value, torch.maximum(whole, value), cut, torch.ones_like(value)


def add_rows(tile: Tensor, table: Tensor, back: Tensor, factor: float | Tensor) -> None:
    """tile[i] += factor[i] * table[back[i]], without gathering a copy of the table's rows on a CPU."""
    if not tile.is_cpu:
        column = factor[:, None] if isinstance(factor, Tensor) else factor
        tile.add_(table.index_select(0, back) * column)
        return
    factors = factor.tolist() if isinstance(factor, Tensor) else [factor] * len(tile)
    for row, place, alpha in zip(tile, back.tolist(), factors, strict=True):
        row.add_(table[place], alpha=alpha)


def dot_rows(tile: Tensor, table: Tensor, back: Tensor) -> Tensor:
    """sum_v tile[i, v] * table[back[i], v], [M]."""
    if not tile.is_cpu:
        return (tile * table.index_select(0, back)).sum(-1)
    return torch.stack([torch.dot(row, table[place]) for row, place in zip(tile, back.tolist(), strict=True)])
