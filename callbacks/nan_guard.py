"""Skips an update whose gradient is not finite, and stops when there are too many in a row.

Every run has it, under a key of its own:

    nan_guard: {in_a_row: 5}
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from adaflash.errors import UserError


class NaNGuard(Callback):
    """Looks at the gradients before every optimizer step, after they have been summed over micro-batches and ranks.

    If any of them is not finite, on any rank, all ranks drop all of them: with no gradient AdamW moves no weight and no
    moment, and decays nothing. The schedule and the count of updates go on. What was skipped is printed with update and
    parameter, and logged as `train/skipped_updates`, the number so far.

    Args:
        in_a_row: Stop the run at so many skipped updates in a row; the last checkpoint is from before them.
    """

    def __init__(self, in_a_row: int = 5) -> None:
        if in_a_row < 1:
            raise UserError(f"nan_guard.in_a_row is {in_a_row}; allowed are 1 and more")
        self.in_a_row = in_a_row
        self.skipped, self.streak = 0, 0

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Lightning asks callbacks before the module, which divides and clips what is left here."""
        bad = culprits(pl_module)
        if trainer.strategy.reduce_boolean_decision(not bad, all=True):
            self.streak = 0
            return
        for parameter in pl_module.parameters():
            parameter.grad = None
        self.skipped, self.streak = self.skipped + 1, self.streak + 1
        if bad or trainer.is_global_zero:
            self._say(trainer, bad)
        pl_module.log("train/skipped_updates", float(self.skipped), batch_size=1)
        if self.streak >= self.in_a_row:
            raise UserError(
                f"update {trainer.global_step + 1}: the gradient was not finite {self.streak} times in a row, so nothing is "
                "learned any more. Go on from a checkpoint with a lower learning rate (--model.optimizer.init_args.lr), or "
                "look at the data; nan_guard.in_a_row sets how long to wait"
            )

    def _say(self, trainer: L.Trainer, bad: list[str]) -> None:
        names = f"{bad[0]} and {len(bad) - 1} more" if len(bad) > 1 else "".join(bad) or "another rank"
        text = (
            f"update {trainer.global_step + 1} skipped: the gradient of {names} is not finite ({self.skipped} so far)"
        )
        print(f"[rank: {trainer.global_rank}] {text}" if trainer.world_size > 1 else text, flush=True)

    def state_dict(self) -> dict[str, Any]:
        """How many so far; a resumed run counts on."""
        return {"skipped": self.skipped, "streak": self.streak}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on."""
        self.skipped, self.streak = state_dict["skipped"], state_dict["streak"]


def culprits(module: torch.nn.Module) -> list[str]:
    """Names of the parameters whose gradient (this rank's shard of it) has no finite norm; one look at the device."""
    gradients = [(name, _local(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    named = [(name, gradient) for name, gradient in gradients if gradient.numel()]
    if not named:
        return []
    finite = torch.stack(torch._foreach_norm([gradient for _, gradient in named])).isfinite().tolist()
    return [name for (name, _), good in zip(named, finite, strict=True) if not good]


def _local(gradient: Tensor) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local
