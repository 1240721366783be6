"""Tensors of a folder: one safetensors file or shards with an index; and a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.errors import UserError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def find_folder(name: str) -> Path:
    """A local folder with a drafter, or the local copy of a Hub id. Raises UserError."""
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"drafter {name}: no such folder, or one without {CONFIG}; give a folder with {CONFIG} and {WEIGHTS}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # offline, unknown, gated: every layer has its own types
        raise UserError(
            f"drafter {name}: not a local folder, and the Hub did not give it ({type(error).__name__}). Download it "
            f"elsewhere and give its folder (with {CONFIG} and {WEIGHTS})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is. Raises UserError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG}: holds {type(config).__name__}, a drafter's config is an object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's model file, or of the shards its index lists. Raises UserError."""
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX}; adaflash reads safetensors only")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: damaged or missing ({error})") from error
    return tensors


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file; tensors that share memory are written apart."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}, file, {"format": "pt"}
    )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Indented JSON with a newline at its end."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path, force: bool) -> Iterator[Path]:
    """A folder to write into; it takes its name only when the block ends without an error.

    Raises:
        UserError: the name is taken and `force` was not asked for.
    """
    if folder.exists() and not force:
        raise UserError(f"{folder} exists; nothing was written. Give another --output, or --force to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield work
        _readable(work)
        if folder.exists():
            old = work.with_name(work.name + "-old")
            os.replace(folder, old)
            os.replace(work, folder)
            _remove(old)
        else:
            os.replace(work, folder)
    finally:
        _remove(work)


def _readable(folder: Path) -> None:
    """For everybody: mkdtemp and safetensors write for the owner alone, and a server may be someone else."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()
