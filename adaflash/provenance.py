"""Where a checkpoint comes from: config, code, versions, data, machine. Plain values only, so that safe loading works."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import adaflash

if TYPE_CHECKING:
    from adaflash.data.base import PromptSource

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "numpy", "jsonargparse", "datasets")


def provenance(config: str, seed: Any = None) -> dict[str, Any]:
    """What is known before any data is read. `config` is the full YAML, defaults and flags included."""
    return {
        "config": config,
        "command": shlex.join(sys.argv),
        "seed": seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "code": {"adaflash": code_state(Path(adaflash.__file__)), "working_directory": code_state(Path.cwd())},
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Of adaflash, Python and what it stands on; packages that are not installed are left out."""
    found = {"adaflash": adaflash.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def code_state(place: Path) -> dict[str, Any]:
    """The commit that a file or folder belongs to, and how it differs; {} where git does not track it (a wheel, no git).

    `diff` is a hash of all changes to tracked files, `changed` and `untracked` are names. A package installed inside
    somebody's checkout is not of that checkout: a file must be tracked itself.
    """
    folder = place if place.is_dir() else place.parent
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or (place.is_file() and not _git(folder, "ls-files", "--error-unmatch", place.name)):
        return {}
    diff = _git(folder, "diff", "HEAD", "--binary") or ""
    state = (_git(folder, "status", "--porcelain", "--untracked-files=normal") or "").splitlines()
    return {
        "commit": commit.strip(),
        "clean": not state,
        "diff": hashlib.sha256(diff.encode()).hexdigest() if diff else "",
        "changed": [line[3:] for line in state if not line.startswith("??")],
        "untracked": [line[3:] for line in state if line.startswith("??")],
    }


def machine() -> dict[str, Any]:
    """What it ran on."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"name": platform.node(), "platform": platform.platform(), "cores": os.cpu_count(), "devices": devices}


def data_state(sources: Iterable[PromptSource]) -> list[dict[str, Any]]:
    """Every source with the rows it gave and the files that were read, as `PromptSource.files` tells of them."""
    return [
        {
            "name": source.name,
            "kind": type(source).__name__,
            "rows": len(source),
            "domains": sorted(source.domains),
            "fingerprint": source.fingerprint(),
            "files": source.files(),
        }
        for source in sources
    ]


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where there is none, or where it does not know."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
