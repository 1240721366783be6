"""Where a run keeps what outlives a process."""

from __future__ import annotations

from pathlib import Path

import lightning as L


def run_folder(trainer: L.Trainer) -> Path:
    """The run's root, the same when the run is resumed; call it on every rank.

    It is `default_root_dir`, or the logger's `save_dir`. `log_dir` (`.../version_3`) changes with every resume, so it
    serves only where neither was chosen and both are the working directory, which all runs share.
    """
    saves = [logger.save_dir for logger in trainer.loggers if logger.save_dir]
    for candidate in (trainer.default_root_dir, *saves):
        if Path(candidate).resolve() != Path.cwd():
            return Path(candidate)
    return Path(trainer.log_dir or trainer.default_root_dir)
