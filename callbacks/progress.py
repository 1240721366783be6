"""The progress bar: update, loss terms, tau, tokens per second, the rollouts' share of the time, time left.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.progress.Progress
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

from adaflash.bench.pace import Pace


class Progress(RichProgressBar):
    """Lightning's rich bar over optimizer updates, with the numbers of this kind of training; plain lines in a file.

    Where the output is no terminal, a line is printed every `every` seconds instead, so that a log stays readable.

    Args:
        refresh_rate: Refreshes a second, in a terminal.
        every: Seconds between two lines, elsewhere.
    """

    def __init__(self, refresh_rate: int = 2, every: float = 30.0) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=False)
        self.every, self._plain = every, False
        self._pace, self._said = Pace(), 0.0
        self._left: float | None = None  # seconds

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lines on rank 0 alone where there is no terminal; nobody else says anything."""
        super().setup(trainer, pl_module, stage)
        self._plain = trainer.is_global_zero and not Console().is_terminal
        if self._plain:
            self.disable()

    @property
    def total_train_batches(self) -> int | float:
        """Updates of the whole run: the stream of prompts has no end."""
        return self.trainer.max_steps if self.trainer.max_steps > 0 else super().total_train_batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._pace, self._left, self._said = Pace(), None, time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Time it."""
        self._pace.begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so."""
        super().on_validation_start(trainer, pl_module)
        if self._plain and trainer.state.fn == "fit":
            print(f"validation at update {trainer.global_step}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what came of it."""
        super().on_validation_end(trainer, pl_module)
        if self._plain and trainer.state.fn == "fit" and "val/tau" in trainer.callback_metrics:
            print(f"validation: tau {float(trainer.callback_metrics['val/tau']):.2f}", flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move to the update that has been done; numbers are read no oftener than they are shown."""
        self._pace.end("rollout" in outputs)
        to_come = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        self._left, now = self._pace.left(to_come, batch.visit, batch.visits), time.monotonic()
        last = trainer.global_step == trainer.max_steps
        if self._plain and (last or now - self._said >= self.every):
            self._said = now
            print(self.line(trainer), flush=True)
        elif self.is_enabled and (last or now - self._said >= 1 / self.refresh_rate):
            self._said = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.global_step - 1)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Shown behind the bar, in an order of ours and with units."""
        return shown({name: float(value) for name, value in trainer.callback_metrics.items()})

    def line(self, trainer: Trainer) -> str:
        """The same as one line of text."""
        numbers = shown({name: float(value) for name, value in trainer.callback_metrics.items()})
        parts = [f"update {trainer.global_step}/{trainer.max_steps}", *(f"{k} {v}" for k, v in numbers.items())]
        return " | ".join([*parts, f"{self.remaining()} left"])

    def remaining(self) -> str:
        """Time the updates to come will take, their rollouts included and validations not."""
        return "-:--:--" if self._left is None else str(timedelta(seconds=round(self._left)))

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Description, bar, updates, time left."""
        description, bar, batches, *_ = super().configure_columns(trainer)
        return [description, bar, batches, _TimeLeft(self)]

    def _get_train_description(self, current_epoch: int) -> str:
        return "update"


class _TimeLeft(ProgressColumn):
    """Elapsed and remaining; the bar's own guess would not know of rollouts that come in bursts."""

    max_refresh = 0.5

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        elapsed = timedelta(seconds=round(task.elapsed or 0))
        training = task.id == self._progress.train_progress_bar_id
        return Text(f"{elapsed}, {self._progress.remaining()} left" if training else str(elapsed))


def shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """Loss terms by name, tau of the last rollout and validation, tokens a second of rollout, its share."""
    found = {name.removeprefix("loss/"): f"{value:.3f}" for name, value in metrics.items() if name.startswith("loss/")}
    for name, label, form in (
        ("train/tau", "tau", "{:.2f}"),
        ("val/tau", "val tau", "{:.2f}"),
        ("throughput/rollout_tokens_per_second", "tok/s", "{:.0f}"),
        ("time/rollout", "rollout", "{:.0%} of the time"),
    ):
        if name in metrics:
            found[label] = form.format(metrics[name])
    return found
