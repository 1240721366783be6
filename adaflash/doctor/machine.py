"""Disk and memory: is there room for the weights, and for a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash.doctor.report import Check, ok

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash

GB = 1e9
SAVED = 3  # float32 weights and the two moments of AdamW in a checkpoint
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def check_memory(target: str, dtype: str) -> Iterator[Check]:
    """Before anything is loaded: will the target's weights fit? Judged by the size of its files."""
    from adaflash.targets.fetch import resolve

    folder = Path(resolve(target))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    free = available()
    if not stored or not free:
        yield Check("memory", "note", f"{free / GB:.1f} GB free; the target's size is not known before it is loaded")
        return
    need = stored * BYTES[dtype] / BYTES.get(_stored_dtype(folder), BYTES[dtype])
    found = f"target {need / GB:.1f} GB of weights, {free / GB:.1f} GB of memory free"
    if need > free:
        yield Check("memory", "fail", found, "use a machine with more memory, or model.target_options.dtype bfloat16")
    elif need > 0.7 * free:
        yield Check("memory", "warn", found, "rollouts and the drafter's optimizer come on top; use fewer lanes")
    else:
        yield ok("memory", found)


def check_disk(drafter: DFlash | None, folder: Path) -> Iterator[Check]:
    """Room for checkpoints: best and last, each with the optimizer's moments."""
    count = sum(parameter.numel() for parameter in drafter.parameters()) if drafter is not None else 0
    need, free = 2 * count * 4 * SAVED, shutil.disk_usage(folder).free
    found = f"{free / GB:.1f} GB free at {folder}" + (f", checkpoints take about {need / GB:.2f} GB" if need else "")
    if free < 1.2 * need or free < GB / 2:
        yield Check("disk", "fail", found, "free some, or put the run elsewhere with --run FOLDER")
    else:
        yield ok("disk", found)


def _stored_dtype(folder: Path) -> str:
    """Number format in which the target's files are, as its config says."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def available() -> float:
    """Bytes of memory that can be had now; 0 where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return 0.0
