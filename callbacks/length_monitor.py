"""Watches the length policy: does what it expects come true?

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.length_monitor.LengthMonitor
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from adaflash.bench import picture
from adaflash.bench.folder import run_folder
from adaflash.bench.log import boards
from adaflash.bench.reliability import reliability_figure, write_rows
from adaflash.length.calibration import CalibrationStats, scalars


class LengthMonitor(Callback):
    """Logs the error of the expected acceptance and the calibration of survival, by domain and by position.

    Validation and test compute all candidates and ask the policy what it expects of each block (`LengthPolicy.forecast`).
    `val/length/error`: mean absolute error of the expected acceptance, in candidates. `val/length/calibration`: mean
    distance of foreseen S_k and the share that survived, over ten bins of S_k; `/{domain}` and `/{k}` are its parts.
    (Wasted, lost and regret are the acceptance monitor's: `val/length/wasted`, ...) Into the run's root folder go
    `reliability.csv`, sums by step, domain, position and bin, and `reliability.png`, which TensorBoard shows as well.

    Policies that expect nothing (fixed lengths) log nothing.

    Args:
        folder: Where the files go. Default: the run's root folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._stats: CalibrationStats | None = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self._begin(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self._begin(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Count the trajectories of one batch."""
        self._count(outputs)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Count the trajectories of one batch."""
        self._count(outputs)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reduce and log on all ranks, write on rank 0."""
        self._publish("val", trainer, pl_module)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reduce and log on all ranks, write on rank 0."""
        self._publish("test", trainer, pl_module)

    def _begin(self, trainer: L.Trainer, pl_module: Any) -> None:
        domains = getattr(getattr(trainer, "datamodule", None), "domains", ())
        self._stats = CalibrationStats(pl_module.drafter.block_size, domains).to(pl_module.device)

    def _count(self, outputs: Any) -> None:
        assert self._stats is not None
        self._stats.update(outputs.get("trajectories") or [] if isinstance(outputs, dict) else [])

    def _publish(self, stage: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._stats is not None
        survival, acceptance = self._stats.compute()  # a collective: before any return, on every rank
        found = scalars(self._stats.domains, survival, acceptance)
        if not found or trainer.sanity_checking:
            return
        pl_module.log_dict({f"{stage}/{name}": value for name, value in found.items()})
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False) or not survival.any():
            return
        folder = Path(self.folder) if self.folder else run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder / "reliability.csv", trainer.global_step, self._stats.domains, survival)
        try:
            figure = reliability_figure(self._stats.domains, survival)
        except ImportError:  # the acceptance monitor says what is missing
            return
        tag, step = f"{stage}/length/reliability", trainer.global_step
        picture.show(figure, folder / "reliability.png", boards(trainer), tag, step)
