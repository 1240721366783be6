"""Hands drafts to a server while training goes on: a new version every so many updates, and `latest` points at it.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.publisher.Publisher
      init_args: {to: sglang, every: 500, keep: 3}
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from adaflash.bench.folder import run_folder
from adaflash.bench.log import to_loggers
from adaflash.callbacks.average import DrafterAverage
from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.command import To, export_drafter
from adaflash.export.manifest import Origin
from adaflash.export.own import Dtype
from adaflash.export.source import Source

LATEST = "latest"


class Publisher(Callback):
    """Exports the drafter every `every` updates and when training ends, as `adaflash export` does, from rank 0.

    A version is `FOLDER/step-00000500`: it appears whole, read back and compared. Then the link `FOLDER/latest` moves to it
    in one step, so that a reader finds the old version or the new one; then all but the last `keep` versions go. With
    `DrafterAverage` it is the average that is published.

    With `reload` the server's controller is told by an HTTP POST of `{"folder": ..., "step": ...}`. Training waits for it
    no longer than `timeout`. A publication or POST that fails is warned of and counted (`publish/failed`), and training
    goes on.

    Args:
        to: sglang (also z-lab, and what adaflash reads back), vllm or hf.
        every: Updates between two versions.
        keep: Versions that stay.
        folder: Where they go; a relative path lies in the run folder.
        dtype: Number format of the weights.
        reload: URL to POST to; empty: nobody is told.
        timeout: Seconds the POST may take.
    """

    def __init__(
        self,
        to: To = "sglang",
        every: int = 500,
        keep: int = 3,
        folder: str = "published",
        dtype: Dtype = "bfloat16",
        reload: str = "",
        timeout: float = 5.0,
    ) -> None:
        if every < 1 or keep < 1 or timeout <= 0:
            raise UserError(
                f"Publisher: allowed are every >= 1, keep >= 1, timeout > 0; got {every}, {keep}, {timeout:g}"
            )
        if reload and not reload.startswith(("http://", "https://")):
            raise UserError(f"Publisher: reload is {reload!r}; an http(s) URL is wanted")
        self.to, self.every, self.keep, self.folder, self.dtype = to, every, keep, folder, dtype
        self.reload, self.timeout = reload, timeout
        self.failed = 0
        self._done = -1  # update of the last version

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Refuse at once what could not be exported later."""
        if not isinstance(pl_module.drafter, DFlash):
            raise UserError(f"Publisher exports DFlash drafters; this one is a {type(pl_module.drafter).__name__}")
        if any(hasattr(parameter, "to_local") for parameter in pl_module.drafter.parameters()):
            raise UserError("Publisher: the drafter is sharded; run `adaflash export` on its checkpoints instead")
        self._done = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A version when one is due: once averages and validation of the update are there, before the next begins."""
        if trainer.global_step > self._done and trainer.global_step % self.every == 0:
            self._publish(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The last one."""
        if trainer.global_step > self._done:
            self._publish(trainer, pl_module)

    def _publish(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._done = trainer.global_step
        if trainer.is_global_zero:
            place = run_folder(trainer) / self.folder
            try:
                version = self._export(trainer, pl_module, place)
                point(place / LATEST, version)
                prune(place, self.keep)
                self._tell(version, trainer.global_step)
            except (OSError, UserError) as error:
                self.failed += 1
                rank_zero_warn(f"update {trainer.global_step}: publishing failed ({error}); training goes on")
            to_loggers(trainer, {"publish/failed": float(self.failed)})

    def _export(self, trainer: L.Trainer, pl_module: Any, place: Path) -> Path:
        """Write the version of this update; one that is there already (from before a resume) is replaced."""
        averages = [each for each in trainer.callbacks if isinstance(each, DrafterAverage)]  # type: ignore[attr-defined]
        chosen = averages[0].averaged(pl_module) if averages else pl_module
        version = place / f"step-{trainer.global_step:08d}"
        source = Source(chosen.drafter, chosen.length, pl_module.target, self._origin(trainer, pl_module))
        with torch.random.fork_rng(devices=[]):  # reading back makes a drafter, whose first weights are random
            export_drafter(source, self.to, version, self.dtype, force=True)
        return version

    def _origin(self, trainer: L.Trainer, pl_module: Any) -> Origin:
        tau, data = trainer.callback_metrics.get("val/tau"), getattr(trainer, "datamodule", None)
        return Origin(
            checkpoint=str(run_folder(trainer)),
            target=pl_module.target_name,
            steps=trainer.global_step,
            tau=None if tau is None else float(tau),
            template_kwargs=dict(getattr(data, "template_kwargs", {})),
        )

    def _tell(self, version: Path, step: int) -> None:
        if not self.reload:
            return
        body = json.dumps({"folder": str(version.absolute()), "step": step}).encode()
        request = urllib.request.Request(self.reload, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=self.timeout):
            pass


def point(link: Path, version: Path) -> None:
    """Move a relative link to a version beside it, in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(version.name, target_is_directory=True)
    os.replace(new, link)


def prune(place: Path, keep: int) -> None:
    """Remove all but the newest versions, and never the one that `latest` points at."""
    versions = sorted(path for path in place.glob("step-*") if path.is_dir())
    for old in versions[:-keep]:
        if old.name != os.readlink(place / LATEST):
            shutil.rmtree(old)
