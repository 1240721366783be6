"""Optimizer and schedule: one line of YAML each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from adaflash.errors import UserError


class AdamWConfig:
    """AdamW with one learning rate for the drafter (and trainable losses) and one for the length head.

    Args:
        lr: Learning rate of the drafter.
        head_lr: Learning rate of the length head.
        weight_decay: Decoupled weight decay of matrices; norms and biases have none.
        betas: Decay rates of the two moments.
        warmup: Optimizer steps of linear warm-up.
        schedule: What follows: "constant", or "cosine" down to a tenth over `trainer.max_steps`.
    """

    def __init__(
        self,
        lr: float = 3e-4,
        head_lr: float = 2e-4,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup: int = 0,
        schedule: Literal["constant", "cosine"] = "constant",
    ) -> None:
        if lr <= 0 or head_lr <= 0 or weight_decay < 0 or warmup < 0:
            raise UserError("model.optimizer: allowed are lr > 0, head_lr > 0, weight_decay >= 0 and warmup >= 0")
        self.lr, self.head_lr, self.weight_decay, self.betas = lr, head_lr, weight_decay, betas
        self.warmup, self.schedule = warmup, schedule

    def build(self, drafter: Iterable[nn.Parameter], head: Iterable[nn.Parameter], max_steps: int) -> dict[str, Any]:
        """What `configure_optimizers` returns."""
        drafter, head = list(drafter), list(head)
        groups = [
            {"name": "drafter", "lr": self.lr, "params": [p for p in drafter if p.ndim >= 2]},
            {"name": "drafter-norms", "lr": self.lr, "weight_decay": 0.0, "params": [p for p in drafter if p.ndim < 2]},
            {"name": "length", "lr": self.head_lr, "weight_decay": 0.0, "params": head},
        ]
        optimizer = self._optimizer([group for group in groups if group["params"]])
        scheduler = LambdaLR(optimizer, lambda step: self._factor(step, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, weight_decay=self.weight_decay)

    def _factor(self, step: int, max_steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant" or max_steps <= self.warmup:
            return 1.0
        done = min(1.0, (step - self.warmup) / (max_steps - self.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def check_trainer(precision: str, gradient_clip_val: float | None) -> None:
    """Refuse settings of the trainer under which this optimizer would do something else than it says.

    Raises:
        UserError: half-precision master weights (norm gains near 1.0 would not move), double precision (the target and
            what it hands over stay float32), or clipping set twice.
    """
    if precision in ("bf16-true", "16-true"):
        raise UserError(
            f"trainer.precision is {precision}: weights near 1.0 would not move. "
            "Use bf16-mixed (or 32-true); the target's own format is model.target_options.dtype"
        )
    if precision == "64-true":
        raise UserError(
            "trainer.precision is 64-true: prompts and states are not handed over in float64. Use 32-true (or bf16-mixed); "
            "the target's own format is model.target_options.dtype"
        )
    if gradient_clip_val is not None:
        raise UserError("trainer.gradient_clip_val: use model.clip, which clips drafter and length policy apart")
