"""`provenance.json` beside the checkpoints: what was run, with which code, on which data.

Every run has it; this adds it to a trainer of one's own:

    trainer:
      callbacks+:
        - class_path: adaflash.callbacks.provenance_file.ProvenanceFile
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from adaflash.provenance import data_state

FILE = "provenance.json"


class ProvenanceFile(Callback):
    """Adds the data to the module's provenance once it has been read, and writes all of it beside the checkpoints.

    The same is inside every checkpoint (`checkpoint["adaflash"]["provenance"]`), so that it travels with the file. After a
    resume `earlier` lists what the run was before, oldest first, each with the update it was left at.
    """

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A resumed run has a past."""
        past = dict(checkpoint.get("adaflash", {}).get("provenance", {}))
        if trainer.state.fn == "fit" and past:
            earlier = past.pop("earlier", [])
            pl_module.provenance["earlier"] = [*earlier, {**past, "left_at": int(checkpoint["global_step"])}]

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The sources are open by now."""
        pools = getattr(getattr(trainer, "datamodule", None), "pools", {})
        pl_module.provenance["data"] = {
            role: data_state(pool.source for pool in mine) for role, mine in pools.items() if mine
        }
        pl_module.provenance["world_size"] = trainer.world_size

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Beside every checkpoint, wherever it goes."""
        folders = [each.dirpath for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        if trainer.is_global_zero:
            for folder in {Path(folder) for folder in folders if folder}:
                _write(folder / FILE, pl_module.provenance)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
