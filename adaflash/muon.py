"""Muon for the drafter's matrices, AdamW for norms and the length head: one optimizer, one line of YAML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim import AdamW, Muon, Optimizer

from adaflash.errors import UserError
from adaflash.optim import AdamWConfig


class MuonConfig(AdamWConfig):
    """Muon (torch.optim.Muon) for matrices, whose steps are orthogonal; everything else has AdamW.

    Args:
        muon_lr: Learning rate of matrices. The field takes about ten times AdamW's.
        momentum: Of matrices, in Nesterov's form.
        adjust: How a matrix's shape scales its rate: "original", by sqrt(max(1, rows / columns)), or "match_rms_adamw",
            by 0.2 sqrt(max(rows, columns)), which takes the rates one would give to AdamW.
        lr: AdamW's learning rate of the drafter's norms and biases.
        head_lr: AdamW's learning rate of the length head.
        weight_decay: Decoupled weight decay of matrices; norms and biases have none.
        betas: AdamW's decay rates of the two moments.
        warmup: Optimizer steps of linear warm-up.
        schedule: What follows: "constant", or "cosine" down to a tenth over `trainer.max_steps`.
    """

    def __init__(
        self,
        muon_lr: float = 3e-3,
        momentum: float = 0.95,
        adjust: Literal["original", "match_rms_adamw"] = "original",
        lr: float = 3e-4,
        head_lr: float = 2e-4,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup: int = 0,
        schedule: Literal["constant", "cosine"] = "constant",
    ) -> None:
        super().__init__(lr, head_lr, weight_decay, betas, warmup, schedule)
        if muon_lr <= 0 or not 0 <= momentum < 1:
            raise UserError("model.optimizer: allowed are muon_lr > 0 and 0 <= momentum < 1")
        self.muon_lr, self.momentum, self.adjust = muon_lr, momentum, adjust

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        for group in groups:
            if group["name"] == "drafter":
                _check(group["params"])
                group["lr"] = self.muon_lr
        return MuonAdamW(
            [group for group in groups if group["name"] == "drafter"],
            [group for group in groups if group["name"] != "drafter"],
            {"weight_decay": self.weight_decay, "momentum": self.momentum, "adjust_lr_fn": self.adjust},
            {"weight_decay": self.weight_decay, "betas": self.betas},
        )


class MuonAdamW(Optimizer):
    """Steps as torch's Muon and AdamW do, each over its own groups; checkpoints and schedules see one optimizer.

    Args:
        matrices: Groups for Muon.
        others: Groups for AdamW.
        muon: Muon's settings.
        adamw: AdamW's settings.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        self._muon = Muon(matrices, **muon) if matrices else None
        self._adamw = AdamW(others, **adamw) if others else None
        super().__init__([group for part in self._parts() for group in part.param_groups], {})

    def _parts(self) -> list[Optimizer]:
        return [part for part in (self._muon, self._adamw) if part is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both. Loading a state replaces groups and moments, so they are handed on at every step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts():
            own = part is self._muon
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == own]
            part.state = self.state
            part.step()
        return loss


def _check(weights: list[torch.nn.Parameter]) -> None:
    odd = [tuple(weight.shape) for weight in weights if weight.ndim != 2]
    if odd:
        raise UserError(
            f"model.optimizer: Muon orthogonalizes matrices, and this drafter has weights of the shapes {odd[:3]}. "
            "Use adaflash.optim.AdamWConfig"
        )
