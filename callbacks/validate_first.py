"""Validation before the first update, so that "before" is in the log.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.validate_first.ValidateFirst
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from adaflash.saving import validate_now


class ValidateFirst(Callback):
    """Runs the validation loop of `fit` once at step 0; a resumed run has its "before" already."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate on every rank alike."""
        if trainer.global_step > 0 or not trainer.enable_validation:
            return
        validate_now(trainer, pl_module)
