"""Checkpoints of any strategy for any other: one file, or a folder of shards that every rank wrote its part of.

A folder is read with torch's own loader, which unpickles: take folders only from people you trust.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from torch import nn

from adaflash.errors import UserError


def is_sharded(path: str | Path) -> bool:
    """Whether a checkpoint is a folder of shards."""
    return (Path(path) / _METADATA_FILENAME).is_file()


def read_sharded(path: str | Path, weights: bool = True) -> dict[str, Any]:
    """The content that one file would have; needs no ranks, and host memory for weights and optimizer.

    weights: False leaves these two out.
    """
    if not weights:
        told: dict[str, Any] = torch.load(Path(path) / _METADATA_FILENAME, map_location="cpu", weights_only=True)
        return {**told, "state_dict": {}}
    content = _load_distributed_checkpoint(Path(path))
    numbered = sorted(key for key in content if key.startswith("optimizer_") and key != "optimizer_states")
    content["optimizer_states"] = [content.pop(key) for key in numbered]
    return content


def take_place(new: Path, path: Path) -> None:
    """Give a complete file or folder its name; a file over a file in one step, else the old one goes once it is done."""
    if not path.exists() or (path.is_file() and new.is_file()):
        os.replace(new, path)
        return
    old = path.with_name(f".{path.name}.old")
    for remove in (shutil.rmtree, Path.unlink):  # what a kill has left
        with contextlib.suppress(OSError):
            remove(old)
    path.rename(old)
    new.rename(path)
    shutil.rmtree(old) if old.is_dir() else old.unlink()


def optimizer_by_name(saved: dict[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's saved state, keyed by the names of parameters.

    Plain optimizers number parameters in the order of their groups. Lightning reads such numbers in the order of the
    model, and would give a parameter the moments of another one, in silence where the shapes agree.

    Raises:
        UserError: the saved groups are not those of this optimizer.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in saved["param_groups"]]
    if list(map(len, ours)) != list(map(len, theirs)):
        raise UserError(
            f"the checkpoint's optimizer has groups of {list(map(len, theirs))} weights, this run's of "
            f"{list(map(len, ours))}: use the config it was trained with, or start a new run without --ckpt_path"
        )
    named = {key: name for group, mine in zip(theirs, ours, strict=True) for key, name in zip(group, mine, strict=True)}
    state = {named[key]: value for key, value in saved["state"].items()}
    groups = [{**group, "params": mine} for group, mine in zip(saved["param_groups"], ours, strict=True)]
    return {"state": state, "param_groups": groups}
