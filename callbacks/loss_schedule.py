"""The weight of a loss term as a function of the step.

    trainer:
      callbacks+:
        - class_path: adaflash.callbacks.loss_schedule.LossSchedule
          init_args: {name: rkl, start: 0.0, end: 0.2, steps: 500}

Logged as `loss_weight/{name}`. A function of the step alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from adaflash.losses import LossTerm


class LossSchedule(Callback):
    """Moves the weight of one term from `start` to `end` over `steps` optimizer steps, and leaves it there.

    Args:
        name: the term, by its name in the log.
        start: weight at the first step.
        end: weight from step `begin + steps` on.
        steps: length of the move, in optimizer steps.
        begin: step at which it starts.
        shape: linear, or half a cosine.
    """

    def __init__(
        self,
        name: str = "rkl",
        start: float = 0.0,
        end: float = 0.2,
        steps: int = 500,
        begin: int = 0,
        shape: Literal["linear", "cosine"] = "linear",
    ) -> None:
        if steps < 1 or begin < 0:
            raise ValueError(f"steps must be at least 1 and begin at least 0, got {steps} and {begin}")
        self.name, self.start, self.end, self.steps, self.begin, self.shape = name, start, end, steps, begin, shape

    @property
    def state_key(self) -> str:
        """One key per term."""
        return f"{type(self).__qualname__}[{self.name}]"

    def weight(self, step: int) -> float:
        """The weight at an optimizer step."""
        done = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a name that no term has, and a second schedule of one term."""
        self._term(pl_module)
        rivals = [each for each in trainer.callbacks if isinstance(each, LossSchedule) and each.name == self.name]  # type: ignore[attr-defined]
        if len(rivals) > 1:
            raise ValueError(f"{len(rivals)} schedules want the weight of loss term {self.name!r}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the weight for this batch; all micro-batches of one step get the same."""
        term = self._term(pl_module)
        term.weight = self.weight(trainer.global_step)
        pl_module.log(f"loss_weight/{self.name}", term.weight, batch_size=1)

    def _term(self, pl_module: LightningModule) -> LossTerm:
        losses: Any = getattr(pl_module, "losses", [])
        for term in losses:
            if isinstance(term, LossTerm) and term.name == self.name:
                return term
        known = ", ".join(term.name for term in losses) or "none"
        raise ValueError(f"LossSchedule: no loss term is named {self.name!r} (there are: {known})")
