"""From a checkpoint of `adaflash fit` back to its drafter, length policy and target, without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from adaflash.checkpoint import read_whole
from adaflash.errors import UserError
from adaflash.module import AdaFlashModule
from adaflash.parallel.checkpoints import is_sharded


def best_device() -> torch.device:
    """Where commands decode and measure: the first GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_run(checkpoint: str | Path, target: str = "", device: torch.device | None = None) -> AdaFlashModule:
    """The trained module of a checkpoint, ready to decode.

    Args:
        checkpoint: A .ckpt file, or the folder of a run (its best checkpoint, else its last).
        target: Where the target is now, if not where the run had it; it must be the same model.
        device: Where drafter, policy and target go; the CPU by default.

    Raises:
        UserError: not a checkpoint, not one of ours, one without its config, or one of another target.
    """
    path = find_checkpoint(Path(checkpoint))
    content = read_whole(path)
    module = _build(_model_config(content, path), target, path)
    module.drafter.remember(_part(content["state_dict"], "drafter"))
    module.configure_model()
    _check_pair(module, content["adaflash"].get("made_for", {}), target, path)
    _load_weights(module, content["state_dict"], path)
    if device is not None:
        module.target.to(device)
        module.to(device)
    return module.eval()


def origin(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint says of its run, weights left where they are: path, step, config, command, versions, made_for.

    Raises:
        UserError: not a checkpoint, or not one of ours.
    """
    path = find_checkpoint(Path(checkpoint))
    content = read_whole(path, mmap=True)
    told = dict(content["adaflash"].get("provenance", {}))
    config = yaml.safe_load(told.pop("config", "") or "{}")
    made_for = content["adaflash"].get("made_for", {})
    return {**told, "path": str(path), "step": content.get("global_step"), "config": config, "made_for": made_for}


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the best (else last) one of a run folder; a file, or a folder of shards."""
    if path.is_file() or is_sharded(path):
        return path
    for name in ("best.ckpt", "last.ckpt", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        if (path / name).is_file() or is_sharded(path / name):
            return path / name
    found = sorted(path.rglob("*.ckpt")) if path.is_dir() else []
    if found:
        return found[-1]
    raise UserError(f"--checkpoint {path}: no such file, or a folder without checkpoints; give a .ckpt or a run folder")


def _model_config(content: dict[str, Any], path: Path) -> dict[str, Any]:
    text = content["adaflash"].get("provenance", {}).get("config", "")
    config = yaml.safe_load(text) if text else None
    if not isinstance(config, dict) or "model" not in config:
        raise UserError(f"{path}: the checkpoint does not hold its config; only runs of `adaflash fit` can be loaded")
    return dict(config["model"])


def _build(config: dict[str, Any], target: str, path: Path) -> AdaFlashModule:
    """The module of the recorded config, with the classes it names."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AdaFlashModule, "model")
    try:
        parsed = parser.parse_object({"model": {**config, **({"target": target} if target else {})}})
        return parser.instantiate(parsed).model
    except UserError:
        raise
    except Exception as error:  # whatever a renamed key or a missing plugin file raises
        raise UserError(
            f"{path}: its config cannot be built here ({error}). Does it name a plugin file of another folder, or was "
            "it made by another version of adaflash?"
        ) from error


def _check_pair(module: AdaFlashModule, made_for: dict[str, Any], target: str, path: Path) -> None:
    """Compare what the checkpoint was made for with what has been built; names the first field that differs."""
    ours = module.made_for()
    if target:
        ours.pop("target", None)  # the user says that it lies elsewhere now; sizes and layers must still agree
    for name, value in ours.items():
        if name in made_for and made_for[name] != value:
            raise UserError(
                f"{path} was made for another target or drafter: its {name} is {made_for[name]!r}, that of "
                f"{module.target_name!r} is {value!r}"
            )


def _load_weights(module: AdaFlashModule, state: dict[str, Any], path: Path) -> None:
    """Strictly, but for loss terms: those of a plugin exist only while it trains, and decoding needs none."""
    for name in ("drafter", "length"):
        try:
            getattr(module, name).load_state_dict(_part(state, name), strict=True)
        except RuntimeError as error:
            raise UserError(f"{path}: the weights of model.{name} do not fit: {error}") from error


def _part(state: dict[str, Any], name: str) -> dict[str, Any]:
    """The weights of one part of the module, under the names they have there."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
