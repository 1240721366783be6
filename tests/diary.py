"""A plugin that writes down every batch, and sends its own process a signal at a chosen place."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Diary(Callback):
    """One line a batch: what was trained on, and the loss to the last bit.

    Args:
        path: File to append to.
        send: Name of the signal to send; empty: none.
        at: Updates done when it is sent.
        where: "batch" (after the update), "next" (in the midst of the next one), "validation" or "writing" (half of a
            checkpoint is on the disk).
        group: Send it to the whole process group, workers included, as schedulers and terminals do.
    """

    def __init__(
        self, path: str = "diary.jsonl", send: str = "", at: int = 0, where: str = "batch", group: bool = False
    ) -> None:
        self.path, self.send, self.at, self.where, self.group = Path(path), send, at, where, group

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ids = [prompt.id for prompt in batch.prompts]
        line = [trainer.global_step, batch.rollout_id, batch.visit, ids, float(outputs["loss"]).hex()]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.where == "writing" and trainer.global_step == self.at:
            _break_writing(self._kill)
        self._at("batch", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._at("next", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._at("validation", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(["validated", trainer.global_step]) + "\n")

    def _at(self, where: str, trainer: Trainer) -> None:
        if self.where == where and self.send and trainer.global_step == self.at:
            self._kill()

    def _kill(self) -> None:
        number = signal.Signals[self.send]
        os.killpg(0, number) if self.group else os.kill(os.getpid(), number)
        self.send = ""


def _break_writing(kill: Any) -> None:
    """Die when half of the next checkpoint has been written."""
    import io

    import torch

    whole = torch.save

    def half(content: Any, path: Any) -> None:
        buffer = io.BytesIO()
        whole(content, buffer)
        with open(path, "wb") as file:
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            kill()

    torch.save = half
