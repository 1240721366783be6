"""The folder of a run: its loggers, making room for a new one, and what its checkpoints say of their origin."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import adaflash
from adaflash.errors import UserError


def loggers(folder: str) -> list[Any]:
    """TensorBoard and CSV, both straight into the run folder."""
    return [TensorBoardLogger(folder, name="", version=""), CSVLogger(folder, name="", version="")]


def make_room(folder: Path, overwrite: bool) -> None:
    """Refuse to start a second run in a folder, or clear what the first one left.

    Raises:
        UserError: the folder holds a run and `overwrite` was not asked for.
    """
    if not (folder / "checkpoints").is_dir() and not (folder / "metrics.csv").is_file():
        return
    if not overwrite:
        raise UserError(
            f"{folder} already holds a run. Add --ckpt_path last to go on with it, --run FOLDER for another, or "
            "--overwrite true to replace it"
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for pattern in ("events.out.tfevents.*", "*.csv", "*.png", "gain.json", "config.yaml"):
        for path in folder.glob(pattern):
            path.unlink()


def provenance(config: str) -> dict[str, Any]:
    """What a checkpoint says of its origin; plain values only, so that safe loading works. `config` is the full YAML."""
    names = ("torch", "lightning", "transformers", "jsonargparse")
    versions = {"adaflash": adaflash.__version__, **{name: version(name) for name in names}}
    return {"config": config, "command": " ".join(sys.argv), "versions": versions}
