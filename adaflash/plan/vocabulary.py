"""The vocabulary pass: what `Workspace` holds, and what stands beside it while one chunk is walked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.losses.base import LossTerm
from adaflash.losses.closed_form import Mixture, split
from adaflash.losses.numerics import working
from adaflash.losses.workspace import Workspace
from adaflash.plan.job import Job
from adaflash.plan.meter import Meter

PROBE = (8, 512)  # rows and vocabulary on which terms without a closed form are tried: what they take grows with both


@dataclass(frozen=True)
class Vocabulary:
    """Bytes by what they are for."""

    workspace: int  # buffers that are allocated once and stay
    logits: int  # the drafter's, their copies by autograd where a term has no closed form, gathered teacher rows
    rows: int  # states of the candidates, their gradients, and the teacher's states

    @property
    def total(self) -> int:
        """All of it at one time."""
        return self.workspace + self.logits + self.rows


def vocabulary_of(job: Job) -> Vocabulary:
    """What the loss of one micro-batch takes, chunk by chunk: it grows with `chunk_rows`, hardly with blocks."""
    hidden, size = job.models.target.hidden_size, job.models.target.embedding_rows
    blocks = job.batch_size * job.anchors
    candidates = blocks * (job.drafter.block_size - 1)
    chunk = min(job.chunk_rows, candidates)
    kind = torch.bfloat16 if job.precision == "bf16-mixed" else job.dtype
    like = torch.empty(chunk, size, dtype=kind, device="meta")
    taught = any(term.needs_teacher for term in job.losses)
    # Candidates' states, those of them that count, their gradients (fp32 each), and these laid over whole blocks.
    states = (3 * candidates + blocks * job.drafter.block_size) * hidden * torch.float32.itemsize
    teacher = job.batch_size * (job.response - 1) * hidden * job.dtype.itemsize if taught else 0
    return Vocabulary(
        workspace_bytes(like, job.losses, job.gpu), chunk_bytes(like, job.losses, job.gpu), states + teacher
    )


def workspace_bytes(like: Tensor, terms: Sequence[LossTerm], gpu: bool, workers: int = 1) -> int:
    """Bytes of the buffers for chunks of the shape and type of `like`: allocated as the walk does, without storage."""
    work = Workspace()
    closed, _ = split(terms)
    if closed and Mixture(closed, work).spread:
        work.teacher(len(like), like)
    work.gradient(like)
    if closed:
        for worker in range(1 if gpu else workers):
            work.tile(worker, like if gpu else like[: work.tile_rows(like)])
    return work.bytes()


def chunk_bytes(like: Tensor, terms: Sequence[LossTerm], gpu: bool) -> int:
    """Bytes beside the workspace while a chunk is walked: logits, and what its terms make on the way."""
    closed, rest = split(terms)
    entries, wide = like.numel(), working(like[:0]).element_size()
    taught = any(term.needs_teacher for term in terms)
    logits = entries * like.element_size()
    raw = logits if taught and (rest or not closed) else 0  # the teacher's, kept for terms that read them
    # Off the CPU the rows of a teacher position are gathered, and scaled, for every candidate that it teaches.
    gathered = 2 * entries * wide if gpu and closed and Mixture(closed, Workspace()).spread else 0
    return logits + raw + max(gathered, round(entries * autograd_bytes(rest, like.dtype)))


def autograd_bytes(terms: Sequence[LossTerm], dtype: torch.dtype) -> float:
    """Bytes an entry of the logits that terms differentiated by autograd take, measured on a small real chunk."""
    if not terms:
        return 0.0
    student = torch.randn(*PROBE, dtype=dtype).requires_grad_()
    teacher, token = torch.randn(*PROBE, dtype=dtype), torch.zeros(PROBE[0], dtype=torch.int64)
    with Meter() as meter:
        expanded = teacher.index_select(0, torch.arange(len(teacher)))
        total = torch.stack([term(student, expanded, token).sum() for term in terms]).sum()
        torch.autograd.grad(total, student)
    return meter.peak / student.numel()
