"""The folder of a run: its loggers, and making room for a new one."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from adaflash.errors import UserError


def loggers(folder: str, command: str) -> list[Any]:
    """TensorBoard and CSV, straight into the run folder; other commands than fit keep their CSV in a folder of their own.

    Lightning's CSV logger deletes the file it finds, so that of a run which goes on is set aside as `metrics.N.csv`.
    """
    place = Path(folder) if command == "fit" else Path(folder) / command
    old = place / "metrics.csv"
    if command == "fit" and old.is_file() and getattr(rank_zero_only, "rank", 0) == 0:
        number = next(n for n in count(1) if not (place / f"metrics.{n}.csv").exists())
        old.rename(place / f"metrics.{number}.csv")
    numbers = CSVLogger(place, name="", version="", flush_logs_every_n_steps=1)  # a kill must not take rows with it
    return [*_tensorboard(folder), numbers]


def _tensorboard(folder: str) -> list[Any]:
    """The TensorBoard logger; without the package a notice, and the CSV has every scalar all the same."""
    if find_spec("tensorboard") is None:
        rank_zero_warn(
            "no TensorBoard log: the package is not installed (pip install tensorboard). All scalars are in metrics.csv"
        )
        return []
    return [TensorBoardLogger(folder, name="", version="", default_hp_metric=False)]


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
    for pattern in (
        "events.out.tfevents.*",
        "*.csv",
        "*.png",
        "gain.json",
        "drafts.jsonl",
        "bench.jsonl",
        "config.yaml",
    ):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)  # another rank may have been faster
