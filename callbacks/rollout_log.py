"""Keeps every rollout of training as JSONL that `RecordedRollout` reads.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.rollout_log.RolloutLog
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import Callback

from adaflash.bench.folder import run_folder
from adaflash.types import Trajectory


class RolloutLog(Callback):
    """Appends fresh rollouts to `FOLDER/rank-R.jsonl`, token ids as they were decoded; every rank owns one file.

    A row has `id`, `domain`, `prompt_ids`, `response_ids` and `finish_reason` as `adaflash predict` writes them, and `step`,
    the updates done when it was made. Whole rollouts are written at once. A resumed run takes out what was made after its
    checkpoint (it is made again) and a row that a kill cut short, so that every rollout is there once.

    Args:
        folder: Where the files go; a relative path lies in the run folder.
    """

    def __init__(self, folder: str = "rollouts") -> None:
        self.folder = folder
        self._file: TextIO | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open this rank's file; a new run begins an empty one."""
        path = run_folder(trainer) / self.folder / f"rank-{trainer.global_rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        cut(path, before=trainer.global_step)
        self._file = path.open("a", encoding="utf-8")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write a fresh rollout."""
        fresh: list[Trajectory] = outputs.get("rollout", [])
        if fresh and self._file is not None:
            rows = (row_of(each, pl_module.buffer.born) for each in fresh if not each.error)
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the file, also after an error."""
        if self._file is not None:
            self._file.close()
            self._file = None


def row_of(trajectory: Trajectory, step: int) -> dict[str, Any]:
    """A row of a rollout file."""
    row = {name: value for name, value in trajectory.row().items() if name != "error"}
    return {**{k: v if isinstance(v, str) else v.tolist() for k, v in row.items()}, "step": step}


def cut(path: Path, before: int) -> None:
    """Keep the whole rows that were made before an update; the file is replaced in one step."""
    if not path.exists():
        return
    partial = path.with_name(f".{path.name}.partial")
    with path.open(encoding="utf-8") as old, partial.open("w", encoding="utf-8") as new:
        for line in old:
            if line.endswith("\n") and json.loads(line)["step"] < before:
                new.write(line)
    os.replace(partial, path)
