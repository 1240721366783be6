"""Settings of the trainer that Lightning takes and then fails on, refused before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from adaflash.errors import UserError
from adaflash.optim import check_trainer


def check_callbacks(given: Sequence[Callback], own: Mapping[str, type[Callback]]) -> None:
    """Raises UserError for what stands in `trainer.callbacks` and would be there twice, or mixed up in checkpoints.

    Args:
        given: Callbacks of `trainer.callbacks`.
        own: Those that every run has once, by the key that sets them.
    """
    for key, kind in own.items():
        if any(type(each) is kind for each in given):
            raise UserError(
                f"trainer.callbacks: every run has a {kind.__name__}; set it by its own key, as in `{key}: {{...}}`"
            )
    stateful = Counter(each.state_key for each in given if is_overridden("state_dict", each, Callback))
    if twice := [name for name, count in stateful.items() if count > 1]:
        raise UserError(
            f"trainer.callbacks: {twice[0]} stands there more than once, and a checkpoint holds one; keep one"
        )


def check_flags(trainer: Mapping[str, Any]) -> None:
    """Raises UserError for a setting that would end in the midst of a run, naming its key and what is allowed."""
    check_trainer(str(trainer.get("precision")), trainer.get("gradient_clip_val"))
    if (window := trainer.get("accumulate_grad_batches")) is not None and window < 1:
        raise UserError(f"trainer.accumulate_grad_batches must be at least 1, got {window}")
    if trainer.get("val_check_interval") == 0:
        raise UserError(
            "trainer.val_check_interval must be at least 1, got 0; --trainer.limit_val_batches 0 leaves validations out"
        )
    if trainer.get("overfit_batches"):
        raise UserError("trainer.overfit_batches is not offered: name a source with few rows in data.train instead")
