"""Logging what happens when it happens, not when Lightning's `log_every_n_steps` comes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger


def log_now(
    trainer: L.Trainer, module: L.LightningModule, values: Mapping[str, float], shown: Sequence[str] = ()
) -> None:
    """Hand training values to every logger at the present update, and to `trainer.callback_metrics`.

    `module.log` keeps a value for the loggers only if this very batch is one that is logged: of values that exist once a
    rollout most would be lost. Call it on every rank, with values that were reduced already; `shown` go to a progress bar.
    """
    for name, value in values.items():
        module.log(name, value, logger=False, on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)
    to_loggers(trainer, values)


def to_loggers(trainer: L.Trainer, values: Mapping[str, float]) -> None:
    """Hand training values to every logger alone; also where `module.log` is not allowed. Rank 0 writes."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # where Lightning puts its own: the first update is 0
    for logger in trainer.loggers if trainer.is_global_zero else []:
        logger.log_metrics(dict(values), step=step)


def boards(trainer: L.Trainer) -> list[Any]:
    """The TensorBoard writers of this run; none where there is no such logger, or on another rank than 0."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
