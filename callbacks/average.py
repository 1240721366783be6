"""The drafter's weights averaged over training; validation, checkpoints and exports have the average.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.average.DrafterAverage
      init_args: {decay: 0.999}
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy

from adaflash.errors import UserError
from adaflash.plugin import LossPlugin


class DrafterAverage(EMAWeightAveraging):
    """Lightning's exponential moving average over everything that is trained: drafter, length policy, losses that learn.

    - Rollouts and gradients use the live weights.
    - Validation (and with it `val/tau`, the best checkpoint and the gain table) uses the average.
    - A checkpoint's `state_dict` is the average: what `export`, `generate` and `validate` load. The live weights lie beside
      it as `current_model_state`, and training resumes from those, also from the checkpoint of a finished run.

    The average is a second copy of what is trained (never of the target), on the same device. Sharded strategies are
    refused: the average would not be sharded.

    Args:
        decay: Weight of the past in every update of the average.
        every: Updates between two of them.
        start: First update that counts.
    """

    def __init__(self, decay: float = 0.999, every: int = 1, start: int = 0) -> None:
        if not 0 <= decay < 1 or every < 1 or start < 0:
            given = f"{decay}, {every}, {start}"
            raise UserError(f"DrafterAverage: allowed are 0 <= decay < 1, every >= 1 and start >= 0, not {given}")
        super().__init__(
            use_buffers=False, decay=decay, update_every_n_steps=every, update_starting_at_step=start or None
        )
        self._swapped = False

    def averaged(self, pl_module: Any) -> Any:
        """The module that holds the average at this moment, `pl_module` itself or the copy."""
        return pl_module if self._swapped or self._average_model is None else self._average_model.module

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Copy what is trained once all of it is there: losses of other plugins too, wherever they stand in the list."""
        if stage != "fit":
            return
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise UserError(
                "DrafterAverage does not average a sharded drafter: use --trainer.strategy ddp, or leave it out"
            )
        for each in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(each, LossPlugin):
                each.setup(trainer, pl_module, stage)
        self._device = self._device or trainer.strategy.root_device  # the module itself is moved there later
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="You're using the WeightAveraging callback with a model that over"
            )
            super().setup(trainer, pl_module, stage)
        self._swapped = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on the module holds the average; the live weights are kept for the last checkpoint."""
        self._swap_models(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The average under `state_dict`, the live weights beside it, whichever of them the module holds now."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._swapped:
            live, average = checkpoint["state_dict"], checkpoint["current_model_state"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = average, live

    def _swap_models(self, pl_module: L.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._swapped = not self._swapped
