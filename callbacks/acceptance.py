"""Watches acceptance: tau, acceptance by position and domain, lengths, spreads; in the log, a CSV file and a picture."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from adaflash.bench import picture
from adaflash.bench.folder import run_folder
from adaflash.bench.history import FILE, History
from adaflash.bench.log import log_now
from adaflash.decoding.stats import AcceptanceStats, Report

CHECKLIST = """tau is {tau:.2f} over {rounds} drafted rounds at step {step}: the drafter is hardly ever right. Check
  - context layers: ids, order and number are those of the checkpoint (layer id l = the output of decoder layer l)
  - mask token: the id is the one the drafter was trained with, never pad, a stop id or a token of the template
  - chat template: prompts are rendered as in training (system prompt, thinking switch, tokenizer revision)
  - dtype and quantisation: the target is the one the drafter was trained for, in the same precision
  - or simply too few updates so far: does the loss still fall?"""


class AcceptanceMonitor(Callback):
    """Counts every decoded trajectory and says how far the drafter's blocks survive.

    Validation and test steps return `{"trajectories": list[Trajectory]}`; a training step that made a fresh rollout puts
    it into its outputs as `"rollout"`. Domains come from `trainer.datamodule.domains`, the block size from
    `pl_module.drafter`. Numbers are those of DESIGN section 8, as sums over all ranks until the report; logged as
    `val/tau`, `val/tau/{domain}`, `val/acceptance/{k}`, ... Checkpoints can be chosen by `val/tau`.

    Into the run's root folder go `acceptance.csv` (a row per validation and domain; the first validation is the
    "before", also after a resume) and `acceptance.png` (acceptance by position, before and now).

    Every run has it, under a key of its own:

        acceptance: {warn_below: 1.1, warn_rounds: 200}

    A validation at step 0 that is to count as "before" is either a real one or the sanity check over all batches
    (`num_sanity_val_steps: -1`); a partial sanity check is not recorded.

    Args:
        folder: Where the files go. Default: the run's root folder (`default_root_dir`, or the logger's).
        warn_below: Warn, with a checklist, when tau is below this after some training.
        warn_rounds: ... over at least this many drafted rounds.
    """

    def __init__(self, folder: str | None = None, warn_below: float = 1.1, warn_rounds: int = 200) -> None:
        self.folder, self.warn_below, self.warn_rounds = folder, warn_below, warn_rounds
        self._stats: dict[str, AcceptanceStats] = {}
        self._history: History | None = None
        self._loaded_step: int | None = None
        self._told: set[str] = set()  # notices are given once

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Every rank logs what was already reduced, so Lightning's advice to use sync_dist does not apply."""
        self._stats, self._loaded_step = {}, None
        folder = Path(self.folder) if self.folder else run_folder(trainer)
        if self._history is None or self._history.path.parent != folder:
            self._history = History(folder)
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\('(val|test)/")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """`validate` from a checkpoint does not restore the loops, so the step is remembered here."""
        self._loaded_step = checkpoint.get("global_step")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a fresh rollout. All ranks take part after every batch: whether one of them has a rollout is not asked."""
        stats = self._stats_of("train", trainer, pl_module)
        stats.update(_trajectories(outputs, "rollout"))
        report = stats.report()
        stats.reset()
        found = {name: value for name, value in report.scalars("train").items() if not math.isnan(value)}
        if found:
            log_now(trainer, pl_module, found, shown=("train/tau",))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self._stats_of("val", trainer, pl_module).reset()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self._stats_of("test", trainer, pl_module).reset()

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Count the trajectories of one batch."""
        self._stats["val"].update(_trajectories(outputs, "trajectories"))

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Count the trajectories of one batch."""
        self._stats["test"].update(_trajectories(outputs, "trajectories"))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reduce, log on all ranks, write on rank 0."""
        self._publish("val", trainer, pl_module)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reduce, log on all ranks, write on rank 0."""
        self._publish("test", trainer, pl_module)

    def _publish(self, stage: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        report = self._stats[stage].report()  # a collective: before any return, on every rank
        scalars = report.scalars(stage)
        if not trainer.sanity_checking:
            tau = f"{stage}/tau"
            pl_module.log(tau, scalars.pop(tau), prog_bar=True)
            pl_module.log_dict(scalars)
        elif trainer.num_sanity_val_batches != trainer.num_val_batches:
            return
        elif trainer.is_global_zero:  # Lightning drops what is logged in a sanity check; this one is the "before"
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=0)
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            self._write(stage, trainer, report)

    def _write(self, stage: str, trainer: L.Trainer, report: Report) -> None:
        assert self._history is not None
        fitting = trainer.state.fn == "fit"
        step = trainer.global_step if fitting or self._loaded_step is None else self._loaded_step
        self._history.append(step, stage, report)
        boards = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        lengths = torch.tensor(report.total.lengths)
        for board in boards:
            if lengths.sum():
                board.add_histogram(f"{stage}/length", torch.arange(len(lengths)).repeat_interleave(lengths), step)
        if stage == "val":
            self._draw(boards, step)
        self._warn(report, step)

    def _draw(self, boards: list[Any], step: int) -> None:
        assert self._history is not None
        ends = self._history.first_and_latest()
        if ends is None:
            return
        try:
            figure = picture.acceptance_figure(*ends)
        except ImportError:
            self._say_once("picture", Text(picture.MISSING.format(file=FILE)))  # Text: brackets are no markup
            return
        picture.show(figure, self._history.path.with_name("acceptance.png"), boards, "acceptance", step)

    def _warn(self, report: Report, step: int) -> None:
        total = report.total
        if step == 0 or total.rounds < self.warn_rounds or total.committed >= self.warn_below * total.rounds:
            return
        tau = total.committed / total.rounds
        text = CHECKLIST.format(tau=tau, rounds=total.rounds, step=step)
        self._say_once("tau", Panel(Text(text), title="acceptance", style="bold red"))

    def _say_once(self, topic: str, message: Any) -> None:
        if topic not in self._told:
            self._told.add(topic)
            Console(stderr=True).print(message)

    def _stats_of(self, stage: str, trainer: L.Trainer, pl_module: Any) -> AcceptanceStats:
        if stage not in self._stats:
            domains = getattr(getattr(trainer, "datamodule", None), "domains", ())
            stats = AcceptanceStats(pl_module.drafter.block_size, domains)
            self._stats[stage] = stats.to(pl_module.device)
        return self._stats[stage]


def _trajectories(outputs: Any, key: str) -> list[Any]:
    return list(outputs.get(key) or []) if isinstance(outputs, dict) else []
