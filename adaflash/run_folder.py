"""The folder of a run: its loggers, and making room for a new one."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from adaflash.errors import UserError


def loggers(folder: str, command: str) -> list[Any]:
    """TensorBoard and CSV, straight into the run folder; other commands than fit have a folder for their CSV."""
    place = Path(folder) if command == "fit" else Path(folder) / command
    numbers = Numbers(place, name="", version="", flush_logs_every_n_steps=1)  # a kill must not take rows with it
    return [*_tensorboard(folder), numbers]


class Numbers(CSVLogger):
    """`metrics.csv`. Lightning's logger deletes the file it finds: that of a run which goes on is set aside instead.

    It becomes `metrics.N.csv`, and has its name again if the run was refused before it logged anything.
    """

    _aside: Path | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Lightning's writer, for which there is room."""
        old = Path(self.log_dir) / "metrics.csv"
        if self._experiment is None and old.is_file():
            number = next(n for n in count(1) if not old.with_name(f"metrics.{n}.csv").exists())
            self._aside = old.rename(old.with_name(f"metrics.{number}.csv"))
        return super().experiment

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        super().finalize(status)
        now = Path(self.log_dir) / "metrics.csv"
        if self._aside is not None and self._aside.is_file() and not now.exists():
            self._aside.rename(now)


def _tensorboard(folder: str) -> list[Any]:
    """The TensorBoard logger; without the package a notice, and the CSV has every scalar all the same."""
    if find_spec("tensorboard") is None:
        rank_zero_warn(
            "no TensorBoard log: the package is not installed (pip install tensorboard). All scalars are in metrics.csv"
        )
        return []
    return [TensorBoardLogger(folder, name="", version="", default_hp_metric=False)]


def room_for(folder: Path, overwrite: bool) -> list[Path]:
    """Refuse to start a second run in a folder; or what the first one left, to be taken away when the new one begins.

    Raises:
        UserError: the folder holds a run and `overwrite` was not asked for.
    """
    if not (folder / "checkpoints").is_dir() and not (folder / "metrics.csv").is_file():
        return []
    if not overwrite:
        raise UserError(
            f"{folder} already holds a run. Add --ckpt_path last to go on with it, --run FOLDER for another, or "
            "--overwrite true to replace it"
        )
    patterns = ("checkpoints", "events.out.tfevents.*", "*.csv", "*.png", "gain.json", "drafts.jsonl", "bench.jsonl")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def writable(folder: Path) -> None:
    """Make the folder of a run. Raises UserError where that cannot be, or where nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--run {folder}: no folder that can be written to ({error.strerror}); name another") from error


class ClearFolder(Callback):
    """Takes away what the run before left, once target and data of the new one are there: a mistake costs no run.

    Args:
        paths: Files and folders of the run before.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before anything of the new run is written; `metrics.csv` has been set aside by its logger."""
        aside = [path for each in self._paths for path in each.parent.glob("metrics.*.csv")]
        for path in {*self._paths, *aside} if trainer.is_global_zero else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self._paths = []
