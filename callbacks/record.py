"""`adaflash predict`: the responses as JSONL that `RecordedRollout` reads.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.record.RecordResponses
      init_args: {output: responses.jsonl}
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class RecordResponses(BasePredictionWriter):
    """Writes every response as token ids, batch by batch; the file gets its name when it is complete.

    Args:
        output: File to write; a relative path lies in the run folder. Several ranks write one file each, numbered.
    """

    def __init__(self, output: str = "responses.jsonl") -> None:
        super().__init__(write_interval="batch")
        self.output = output

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start an empty file beside the final one."""
        path = self._partial(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append one batch; a request that could not be served is left out and told."""
        with self._partial(trainer).open("a", encoding="utf-8") as file:
            for row in prediction:
                if row["error"]:
                    print(f"adaflash predict: {row['id']}: {row['error']}")
                else:
                    file.write(json.dumps(_plain(row)) + "\n")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the complete file its name."""
        os.replace(self._partial(trainer), self._path(trainer))
        print(f"responses: {self._path(trainer)}")

    def _path(self, trainer: Trainer) -> Path:
        path = Path(trainer.default_root_dir) / self.output
        return path if trainer.world_size == 1 else path.with_stem(f"{path.stem}-{trainer.global_rank}")

    def _partial(self, trainer: Trainer) -> Path:
        path = self._path(trainer)
        return path.with_name(path.name + ".partial")


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `AdaFlashModule.predict_step` as JSON takes it."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in row.items() if key != "error"}
