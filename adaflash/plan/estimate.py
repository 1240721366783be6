"""The plan: memory of one device by part and by phase of a run. Phases do not add up: one ends before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaflash.plan.job import Job
from adaflash.plan.layout import share
from adaflash.plan.meter import nbytes
from adaflash.plan.rollout import Decoding, buffer_bytes, rollout_of, validation_of
from adaflash.plan.update import update_of
from adaflash.plan.vocabulary import vocabulary_of

PHASES = ("rollout", "update", "step", "validation")


@dataclass(frozen=True)
class Part:
    """Bytes of one thing, in the phases in which it is there."""

    name: str
    what: str  # how it comes about
    phases: dict[str, int]

    @property
    def largest(self) -> int:
        """Bytes in the phase in which it takes most."""
        return max(self.phases.values(), default=0)


@dataclass(frozen=True)
class Plan:
    """All parts of a job on one device."""

    parts: tuple[Part, ...]

    def total(self, phase: str) -> int:
        """Bytes in a phase."""
        return sum(part.phases.get(phase, 0) for part in self.parts)

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes in that phase: what the device must have."""
        return self.total(self.worst)


def estimate(job: Job) -> Plan:
    """What stays, then what each phase adds to it."""
    parts = [*_weights(job), *_training(job), *_decoding(job)]
    return Plan(tuple(part for part in parts if part.largest))


def _weights(job: Job) -> list[Part]:
    """Target and drafter, and what is gathered of them where they are sharded."""
    layout, target, drafter = job.layout, job.models.target, job.drafter
    layers = list(target.layers.parameters())
    rest = nbytes(list(target.model.parameters())) - nbytes(layers)
    held = share(layers, layout.target_parts) + rest
    cut = f"layers sharded over {layout.target_parts}" if layout.target_parts > 1 else "a whole copy"
    drafted = list(drafter.parameters())
    own = share(drafted, layout.drafter_parts)
    kept = f"sharded over {layout.drafter_parts}" if layout.drafter_parts > 1 else "a whole copy"
    length = list(job.length.parameters())
    buffer = f"{job.rollout_size} trajectories x {job.prompt + job.response:,} tokens: context and teacher states"
    return [
        Part("target weights", f"{_count(target.model)}, {_kind(job.dtype)}, {cut}", _always(held)),
        Part("target gathered", "whole while it decodes" if layout.gathers_target else "two layers at a time",
             _while_decoding(_gathered_target(job, layers))),
        Part("drafter weights", f"{_count(drafter)}, fp32, {kept}", _always(own)),
        Part("drafter gathered", "whole while it decodes, two layers while it learns", _gathered_drafter(job)),
        Part("length policy", job.length.describe(), _always(share(length, layout.drafter_parts))),
        Part("rollout buffer", buffer, _always(buffer_bytes(job))),
    ]  # fmt: skip


def _training(job: Job) -> list[Part]:
    """One update: passes and optimizer."""
    update, vocabulary, parts = update_of(job), vocabulary_of(job), job.layout.drafter_parts
    blocks = f"{job.batch_size} x {job.anchors} blocks of {job.drafter.block_size}"
    depth = len(getattr(job.drafter, "layers", ()))
    gradients = -(-update.gradients // parts)
    earlier = gradients if job.accumulate > 1 else 0  # else they grow while activations go
    walk, passes = vocabulary.total, update.temporaries
    what = "vocabulary pass" if walk >= passes else "temporaries of backward"
    rows = f"{job.chunk_rows} rows x {job.models.target.embedding_rows:,}: {_gib(vocabulary.workspace)} of buffers"
    bucket = update.gradients if job.layout.copies_gradients else 0
    return [
        Part("gradients", "fp32", {"update": earlier, "step": gradients}),
        Part("gradient buckets", "DDP's own copy", _always(bucket)),
        Part("optimizer state", "moments, fp32", _always(-(-update.moments // parts))),
        Part("activations", f"{blocks} x {depth} layers, context {job.batch_size} x {job.prompt + job.response - 2:,}",
             {"update": update.activations}),
        Part(what, rows if walk >= passes else "for a moment", {"update": max(walk, passes)}),
        Part("optimizer's step", "for a moment", {"step": -(-update.step // parts)}),
    ]  # fmt: skip


def _decoding(job: Job) -> list[Part]:
    """Pools and passes of rollouts and of validation."""
    rollout, validation = rollout_of(job), validation_of(job)
    config = job.models.target.config
    lanes = f"{job.lanes} lanes (validation: {job.val_lanes})"
    room = job.prompt + job.response + job.drafter.block_size
    kv = f"{lanes} x {room:,} positions x {config.num_hidden_layers} layers, {_kind(job.dtype)}"

    def both(name: str) -> dict[str, int]:
        return {"rollout": getattr(rollout, name), "validation": getattr(validation, name)}

    assert set(Decoding.__dataclass_fields__) == {"target_pool", "draft_pool", "passes"}
    return [
        Part("target KV pool", kv, both("target_pool")),
        Part(
            "drafter's context pool", f"{lanes} x {len(getattr(job.drafter, 'layers', ()))} layers", both("draft_pool")
        ),
        Part("decoding passes", "logits and states of the largest pass", both("passes")),
    ]


def _gathered_target(job: Job, layers: Sequence[torch.Tensor]) -> int:
    if job.layout.target_parts == 1:
        return 0
    if job.layout.gathers_target:
        return nbytes(layers)
    return 2 * nbytes(list(job.models.target.layers[0].parameters()))


def _gathered_drafter(job: Job) -> dict[str, int]:
    """Compute copies of a sharded drafter."""
    if job.layout.drafter_parts == 1:
        return {}
    size = 2 if job.precision == "bf16-mixed" else 4
    layers: Any = getattr(job.drafter, "layers", [job.drafter])
    whole = size * sum(p.numel() for p in job.drafter.parameters())
    two = size * 2 * max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    return {"rollout": whole, "validation": whole, "update": two}


def _always(size: int) -> dict[str, int]:
    return dict.fromkeys(PHASES, size)


def _while_decoding(size: int) -> dict[str, int]:
    return {"rollout": size, "validation": size}


def _count(module: torch.nn.Module) -> str:
    """Number of weights."""
    number = sum(p.numel() for p in module.parameters())
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
