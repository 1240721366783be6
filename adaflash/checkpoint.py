"""Checkpoint files: written whole or not at all, and read with a message that says which other one to use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from adaflash.errors import UserError
from adaflash.parallel.checkpoints import is_sharded, read_sharded, take_place


class WholeCheckpoints(TorchCheckpointIO):
    """Reads and writes checkpoints of a run.

    Lightning's own writer keeps a second copy in memory, writes it to the system's temporary folder and moves it: on
    another disk that is a copy, which a kill cuts off.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the file, force it onto the disk, then give it its name."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_whole(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content, on the CPU. Raises UserError for what is no whole checkpoint of ours."""
        if "://" in str(path):
            try:
                return super().load_checkpoint(path, map_location, weights_only)
            except (OSError, ImportError, ValueError) as error:
                raise UserError(f"--ckpt_path {path}: it cannot be read ({error}); is the address right?") from error
        return read_whole(Path(path), weights_only is not False)


def write_whole(content: Any, path: Path) -> None:
    """`torch.save` such that a kill at any time leaves the previous file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")  # one name: what a kill leaves is written over by the next save
    try:
        torch.save(content, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        take_place(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(
            f"{path}: the checkpoint could not be written ({error}); the one before it is untouched"
        ) from error


def read_whole(path: Path, weights_only: bool = True, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint of `adaflash fit`; with `mmap` tensors stay on the disk until they are used.

    Raises:
        UserError: missing, empty, cut off, no checkpoint, or not one of ours; names a good one beside it.
    """
    try:
        return _read(path, weights_only, mmap)
    except Broken as broken:
        raise UserError(f"{broken}. {_instead_of(path)}") from broken


class Broken(ValueError):
    """A file that is no whole checkpoint of ours: which one, and why."""


def _read(path: Path, weights_only: bool = True, mmap: bool = False) -> dict[str, Any]:
    sharded = is_sharded(path)
    if not sharded and path.is_dir():
        raise Broken(f"{path}: a folder; name a checkpoint in it, such as {path / 'checkpoints' / 'last.ckpt'}")
    if not sharded and not path.is_file():
        raise Broken(f"{path}: no such checkpoint")
    if not path.stat().st_size:
        raise Broken(f"{path}: the file is empty")
    try:
        content = (
            read_sharded(path, weights=not mmap)
            if sharded
            else torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
        )
    except Exception as error:  # a damaged or foreign file raises nearly anything
        why = " ".join(str(error).split())[:120]
        raise Broken(f"{path}: cut off, or not a checkpoint that can be read ({why})") from error
    if not isinstance(content, dict) or "adaflash" not in content or "state_dict" not in content:
        raise Broken(f"{path}: this checkpoint was not written by adaflash fit (it has no 'adaflash' entry)")
    return content


@dataclass(frozen=True, order=True)
class Found:
    """A checkpoint, a file or a folder of shards, that is whole; the best of several is the largest."""

    updates: int
    written: float  # seconds since the epoch
    path: Path


def whole_checkpoints(folder: Path) -> tuple[list[Found], list[str]]:
    """Whole checkpoints of a folder, the best one last, and why others were passed over. Tensors are not read."""
    found, bad = [], []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            found.append(Found(int(_read(path, mmap=True).get("global_step", 0)), path.stat().st_mtime, path))
        except Broken as broken:
            bad.append(str(broken))
    return sorted(found), bad


def _instead_of(path: Path) -> str:
    found, _ = whole_checkpoints(path.parent)
    if not found:
        return f"There is no good checkpoint in {path.parent} either"
    return f"Use {found[-1].path}, which is whole ({found[-1].updates} updates)"


def resolve(name: str, folder: Path) -> str:
    """What `--ckpt_path` means: a path, or in `folder` the whole one with most updates (`last`), or the `best` one.

    Returns:
        The path, or "" for `last` where there is no checkpoint at all: a run that is always started with
        `--ckpt_path last` begins by itself.

    Raises:
        UserError: nothing whole is left; the messages of all of them.
    """
    if name != "last":
        path = folder / "best.ckpt" if name == "best" else Path(name)
        if "://" not in name:
            read_whole(path, mmap=True)  # now, not after the target has been loaded
        return name if "://" in name else str(path)
    found, bad = whole_checkpoints(folder)
    if bad and not found:
        raise UserError("--ckpt_path last: no checkpoint is whole, start anew without it.\n" + "\n".join(bad))
    for each in bad:
        rank_zero_warn(f"passed over {each}")
    return str(found[-1].path) if found else ""
