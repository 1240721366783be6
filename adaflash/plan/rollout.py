"""Decoding, played through without storage: pools, passes of target and drafter, and the states that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from adaflash.blocks import block_tokens
from adaflash.decoding.cache import LanePool, pool_bytes
from adaflash.decoding.drafting import _proposal
from adaflash.decoding.sampling import best_tokens
from adaflash.decoding.session import PREFILL_ROWS
from adaflash.drafters.base import embed_blocks
from adaflash.plan.job import Job
from adaflash.plan.meter import Meter, autocast, grown
from adaflash.plan.models import Models
from adaflash.types import Segments


@dataclass(frozen=True)
class Decoding:
    """Bytes while requests are decoded on one device."""

    target_pool: int
    draft_pool: int
    passes: int  # logits and intermediate states of the largest pass


def buffer_bytes(job: Job) -> int:
    """Context rows [E - 1, C] and teacher rows [E - P - 1, H] of every trajectory of a rollout, and its token ids."""
    tokens = job.prompt + job.response
    wide = len(job.drafter.context_layers) * job.models.target.hidden_size
    whole = 0 if job.lanes else 1  # one read of a recorded text also gives the last row, which nothing needs
    context = (tokens - 1 + whole) * wide
    teacher = (job.response - 1 + whole) * job.models.target.hidden_size
    return job.rollout_size * ((context + teacher) * job.dtype.itemsize + tokens * torch.int64.itemsize)


def rollout_of(job: Job) -> Decoding:
    """What making one rollout takes, beside the states that it leaves."""
    if not job.lanes:
        tokens = job.prompt + job.response
        count = max(min(job.read_rows // tokens, job.rollout_size), 1)
        return Decoding(0, 0, _read(job.models, job.precision, count, tokens))
    return _decoding(job, job.lanes, job.response, every=False)


def validation_of(job: Job) -> Decoding:
    """Decoding of held-out prompts, with all vocabulary rows of the drafter."""
    return _decoding(job, job.val_lanes, job.val_response, every=True)


def _decoding(job: Job, lanes: int, response: int, every: bool) -> Decoding:
    config, size = job.models.target.config, job.drafter.block_size
    capacity = job.prompt + response + size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool = pool_bytes(lanes, capacity, job.models.target.num_layers, heads, dim, job.dtype)
    prompts = min(lanes, -(-PREFILL_ROWS // job.prompt))
    passes = max(
        grown(lambda count: _read(job.models, job.precision, count, job.prompt, lanes, capacity), prompts),
        grown(lambda count: _verify(job.models, job.precision, count, capacity), lanes),
        grown(lambda count: _draft(job.models, job.precision, count, capacity, every), lanes),
    )
    return Decoding(pool, _draft_pool(job.models, job.precision, lanes, capacity), passes)


@cache
def _read(models: Models, precision: str, count: int, tokens: int, lanes: int = 0, capacity: int = 0) -> int:
    """One read of `count` whole texts; into a pool where lanes are given: then only the last row is decoded."""
    pool = LanePool(lanes, capacity) if lanes else None
    with models.mode:
        ids = torch.zeros(count * tokens, dtype=torch.int64)
    segments, layers = Segments.whole([tokens] * count), range(len(models.drafter.context_layers))
    with torch.no_grad(), Meter() as meter, autocast(precision):
        features = models.shallow.read(ids, segments, layers, pool)
        if pool is not None:
            best_tokens(models.shallow.head(features.hidden[[end - 1 for end in segments.offsets[1:]]]))
    return meter.peak - (pool.bytes() if pool else 0)


@cache
def _verify(models: Models, precision: str, lanes: int, capacity: int) -> int:
    """One pass over full windows near the end of every lane."""
    size, pool = models.drafter.block_size, LanePool(lanes, capacity)
    with models.mode:
        ids = torch.zeros(lanes * size, dtype=torch.int64)
    segments = Segments(tuple(range(lanes)), (capacity - size,) * lanes, (size,) * lanes)
    with torch.no_grad(), Meter() as meter, autocast(precision):
        layers = range(len(models.drafter.context_layers))
        best_tokens(models.shallow.head(models.shallow.read(ids, segments, layers, pool).hidden))
    return meter.peak - pool.bytes()


@cache
def _draft(models: Models, precision: str, lanes: int, capacity: int, every: bool) -> int:
    """One block a lane and its vocabulary rows; with `every`, or a policy that asks for them, as validation does."""
    drafter, pool = models.drafter, _filled(models, precision, lanes, capacity)
    with models.mode:
        tokens = block_tokens(torch.zeros(lanes, dtype=torch.int64), drafter.block_size, drafter.mask_id)
    anchors = torch.full((lanes,), capacity - drafter.block_size)
    with torch.no_grad(), Meter() as meter, autocast(precision), models.target.autocast():
        embeds = embed_blocks(models.target, tokens, torch.float32)
        hidden = drafter.draft(embeds, anchors, list(range(lanes)), pool)
        _proposal(hidden, anchors, models.target.head(hidden[:, 1:]), models.length.needs_logits)
        if every:
            models.length.forecast(_proposal(hidden, anchors, models.target.head(hidden[:, 1:]), True))
    return meter.peak


@cache
def _draft_pool(models: Models, precision: str, lanes: int, capacity: int) -> int:
    return _filled(models, precision, lanes, capacity).bytes()


def _filled(models: Models, precision: str, lanes: int, capacity: int) -> LanePool:
    """The drafter's pool, allocated by its own first write."""
    pool, drafter = LanePool(lanes, capacity), models.drafter
    with models.mode:
        row = torch.zeros(1, len(drafter.context_layers) * models.target.hidden_size, dtype=models.target.dtype)
    with torch.no_grad(), autocast(precision), models.target.autocast():
        drafter.ingest(row, Segments((0,), (0,), (1,)), pool)
    return pool
