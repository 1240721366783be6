"""What is to be exported: the run of a checkpoint, or a drafter's folder of any known format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from adaflash.checkpoint import read_whole
from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.manifest import Origin, read_manifest
from adaflash.export.own import load_drafter, load_length
from adaflash.export.weights import CONFIG
from adaflash.length.base import LengthPolicy

if TYPE_CHECKING:
    from adaflash.targets.hf import HFTarget


@dataclass(frozen=True)
class Source:
    """A drafter with its policy and target, and where it comes from."""

    drafter: DFlash
    length: LengthPolicy | None
    target: HFTarget
    origin: Origin


def open_source(checkpoint: str, target: str = "", dtype: str = "float32") -> Source:
    """Load a .ckpt, a run folder, or a drafter's folder or Hub id (which needs the target's name).

    Raises:
        UserError: nothing of the kind, not a DFlash drafter, or made for another target.
    """
    path = Path(checkpoint).expanduser()
    if path.suffix == ".ckpt" or (path.is_dir() and not (path / CONFIG).is_file()):
        return _from_run(path, target)
    return _from_folder(checkpoint, target, dtype)


def _from_run(path: Path, target: str) -> Source:
    from adaflash.run import find_checkpoint, load_run

    file = find_checkpoint(path)
    module = load_run(file, target)
    if not isinstance(module.drafter, DFlash):
        raise UserError(
            f"{file}: its drafter is a {type(module.drafter).__name__}; only DFlash drafters can be exported"
        )
    return Source(module.drafter, module.length, module.target, _origin(file))


def _from_folder(name: str, target: str, dtype: str) -> Source:
    from adaflash.targets.hf import HFTarget, TargetOptions

    if not Path(name).expanduser().exists() and name.count("/") != 1:
        raise UserError(
            f"--checkpoint {name}: no such file or folder. Give a .ckpt, a run folder, or a drafter's folder"
        )
    if not target:
        raise UserError(f"{name} is a drafter without its target: add --target NAME (the model it was trained for)")
    loaded = HFTarget.load(target, TargetOptions(dtype=dtype))  # type: ignore[arg-type]
    drafter, head = load_drafter(name, loaded)
    length = load_length(head, loaded, drafter.block_size) if head else None
    return Source(drafter, length, loaded, _known_origin(Path(name).expanduser(), name, target))


def _known_origin(folder: Path, name: str, target: str) -> Origin:
    """What adaflash.json says, if the drafter was written by adaflash."""
    manifest = read_manifest(folder) if folder.is_dir() else {}
    training, template = manifest.get("training") or {}, manifest.get("template") or {}
    return Origin(
        checkpoint=training.get("checkpoint") or name,
        target=target,
        steps=int(training.get("steps") or 0),
        tau=training.get("best_val_tau"),
        template_kwargs=dict(template.get("kwargs") or {}),
    )


def _origin(file: Path) -> Origin:
    """What a checkpoint of `adaflash fit` says of its run; unknown fields stay empty."""
    content = read_whole(file, mmap=True)
    text = content["adaflash"].get("provenance", {}).get("config", "")
    config: dict[str, Any] = yaml.safe_load(text) or {} if text else {}
    model, data = config.get("model") or {}, config.get("data") or {}
    return Origin(
        checkpoint=str(file),
        target=str(model.get("target") or ""),
        revision=str((model.get("target_options") or {}).get("revision") or "").replace("main", ""),
        steps=int(content.get("global_step", 0)),
        tau=_best_tau(content.get("callbacks") or {}),
        template_kwargs=dict(data.get("template_kwargs") or {}),
    )


def _best_tau(callbacks: dict[str, Any]) -> float | None:
    """The best val/tau that a checkpoint callback has seen."""
    scores = [
        float(state["best_model_score"])
        for state in callbacks.values()
        if isinstance(state, dict) and state.get("monitor") == "val/tau" and state.get("best_model_score") is not None
    ]
    return max(scores) if scores else None
