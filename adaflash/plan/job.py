"""Everything that the size of a run depends on, read from the configuration of `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaflash.drafters.base import Drafter
from adaflash.length.base import LengthPolicy
from adaflash.losses.base import LossTerm
from adaflash.plan.layout import Layout
from adaflash.plan.models import Models


@dataclass(frozen=True)
class Job:
    """One run on one kind of device. Lengths are the longest that the configuration allows: what fits, always fits."""

    models: Models
    layout: Layout
    losses: Sequence[LossTerm]
    optimizer: Any  # the optimizer's config
    precision: str
    gpu: bool
    max_prompt: int  # tokens of the longest prompt that is taken
    response: int  # tokens of the longest response
    batch_size: int
    rollout_size: int
    reuse: int
    accumulate: int
    num_anchors: int
    chunk_rows: int
    lanes: int  # requests decoded at once in rollouts; 0 where rollouts do not decode
    read_rows: int  # rows of one read of recorded rollouts; 0 where they decode
    val_lanes: int
    val_response: int
    max_steps: int
    recompute: bool = False  # layers of the drafter run again in the backward pass

    @property
    def drafter(self) -> Drafter:
        """The drafter, without storage."""
        return self.models.drafter

    @property
    def length(self) -> LengthPolicy:
        """The length policy, without storage."""
        return self.models.length

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for the longest response."""
        return max(min(self.max_prompt, self.models.target.max_positions - self.response), 1)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the target."""
        return self.models.target.dtype

    @property
    def anchors(self) -> int:
        """Blocks of one trajectory: no more than a response has places for."""
        return max(min(self.num_anchors, self.response - 1), 1)


def job_of(model: Any, data: Any, trainer: Any, layout: Layout) -> Job:
    """From the parts that the command line builds for `fit`; `trainer` is its section of the configuration."""
    models = Models.build(model.target_name, model.target_options, model.drafter, model.length, model.freeze_drafter)
    context = models.target.max_positions
    rollout = model.rollout
    response = min(rollout.max_new_tokens, context - 1)
    precision = "bf16-mixed" if str(trainer.precision) in ("bf16-mixed", "bf16") else "32-true"
    return Job(
        models, layout, list(model.losses), model.optimizer_config, precision, trainer.accelerator != "cpu",
        max_prompt=data.max_prompt_tokens, response=response,
        batch_size=data.batch_size, rollout_size=data.rollout_size, reuse=data.reuse,
        accumulate=trainer.accumulate_grad_batches, num_anchors=model.num_anchors, chunk_rows=model.step.chunk_rows,
        lanes=min(getattr(rollout, "lanes", 0), data.rollout_size), read_rows=getattr(rollout, "read_rows", 0),
        val_lanes=min(model.lanes, data.val_batch_size), val_response=min(model.max_new_tokens, context - 1),
        max_steps=trainer.max_steps, recompute=model.parallel.recompute,
    )  # fmt: skip
