"""One update of the drafter, played through without storage: its own forward, backward and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from adaflash.blocks import context_rows
from adaflash.drafters.base import Drafter, embed_blocks
from adaflash.length.base import Outcome
from adaflash.parallel.placement import recompute
from adaflash.plan.job import Job
from adaflash.plan.meter import Meter, autocast, grown, nbytes
from adaflash.plan.models import Models
from adaflash.types import Blocks, Segments


@dataclass(frozen=True)
class Update:
    """Bytes on a device that shards nothing."""

    activations: int  # alive between forward and backward: what autograd keeps, and the packed context rows
    temporaries: int  # beyond these (and gradients of earlier micro-batches) at the worst moment of the passes
    gradients: int
    moments: int
    step: int  # temporaries of the optimizer


def update_of(job: Job) -> Update:
    """What one update takes; with accumulation the gradients of earlier micro-batches are there all the time."""
    tokens, earlier = job.prompt + job.response, job.accumulate > 1

    def played(index: int, rows: int) -> int:
        return _passes(job.models, job.precision, rows, job.anchors, tokens, earlier, job.recompute)[index]

    kept, beyond = (grown(partial(played, index), job.batch_size) for index in (0, 1))
    return Update(kept, beyond, *_step(job.models, job.optimizer, job.gpu))


@cache
def _passes(
    models: Models, precision: str, rows: int, anchors: int, tokens: int, earlier: bool, again: bool = False
) -> tuple[int, int]:
    """Bytes alive after forward, and beyond them at the worst moment of both passes."""
    trained = _trained(models)
    with models.mode:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if earlier else None
        blocks = _blocks(rows, anchors, models.drafter.block_size)
        states = [_context(models, context_rows(tokens)) for _ in range(rows)]
    with recomputing(models.drafter, again), Meter() as meter, autocast(precision):
        context = torch.cat(states)
        embeds = embed_blocks(models.target, blocks.tokens, torch.float32)
        hidden = models.drafter(embeds, blocks, context, Segments.whole([context_rows(tokens)] * rows))
        kept = meter.now
        loss = models.length.loss(_outcome(models, hidden, blocks))
        if loss is not None:
            loss.backward()
        if hidden.requires_grad:
            hidden.backward(torch.zeros_like(hidden))
    return kept, meter.peak - kept


@contextmanager
def recomputing(drafter: Drafter, again: bool) -> Iterator[None]:
    """Layers keep no activations, for a while, if they should not."""
    if again:
        recompute(drafter)
    try:
        yield
    finally:
        for layer in getattr(drafter, "layers", []) if again else []:
            layer.forward = layer._kept_forward
            del layer._kept_forward


@cache
def _step(models: Models, optimizer: Any, gpu: bool) -> tuple[int, int, int]:
    """Bytes of all gradients, of the optimizer's state, and what its step takes for a moment."""
    trained = _trained(models)
    with models.mode:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    gradients = nbytes([parameter.grad for parameter in trained])
    drafter = [p for p in models.drafter.parameters() if p.requires_grad]
    made = optimizer.build(drafter, models.length.parameters(), 1)["optimizer"]
    for group in made.param_groups:
        group["foreach"] = gpu or None  # on a GPU all tensors at once, which needs more memory for a moment
    with Meter() as meter:
        made.step()
    moments = sum(nbytes(state) for state in made.state.values())
    return gradients, moments, max(meter.peak - moments, 0)


def _trained(models: Models) -> list[torch.nn.Parameter]:
    return [p for owner in (models.drafter, models.length) for p in owner.parameters() if p.requires_grad]


def _context(models: Models, count: int) -> Tensor:
    width = len(models.drafter.context_layers) * models.target.hidden_size
    return torch.zeros(count, width, dtype=models.target.dtype)


def _blocks(rows: int, anchors: int, size: int) -> Blocks:
    """Blocks of the right shape. Which trajectory each belongs to must be real: the drafter counts them."""
    count = rows * anchors
    tokens, numbers = torch.zeros(count, size, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    place = [row for row in range(rows) for _ in range(anchors)]
    return Blocks(_real(place), numbers, tokens, tokens[:, 1:], tokens[:, 1:] == 0, numbers == 0)


def _real(values: list[int]) -> Tensor:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.tensor(values)


def _outcome(models: Models, hidden: Tensor, blocks: Blocks) -> Outcome:
    agreed = blocks.labels == 0
    return Outcome(hidden.detach(), agreed.sum(1).float(), blocks.full, agreed, blocks.supervised, models.target.head)
