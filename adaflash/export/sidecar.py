"""A length policy beside a drafter, for servers that do not know it: a folder of its own, never extra tensors.

In a folder, because servers read every safetensors file that lies next to config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from adaflash.export.weights import CONFIG, WEIGHTS, read_config, write_json, write_tensors
from adaflash.length.base import LengthPolicy

FOLDER = "length_policy"


def write_sidecar(folder: Path, length: LengthPolicy | None) -> bool:
    """The weights of a learned policy, and which class reads them; says whether there was anything to write."""
    state = dict(length.state_dict()) if length is not None else {}
    if length is None or not state:
        return False
    write_tensors(folder / FOLDER / WEIGHTS, state)
    write_json(folder / FOLDER / CONFIG, describe(length))
    return True


def read_sidecar(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Class path and state of the policy beside a drafter; ("", {}) if there is none."""
    if not (folder / FOLDER / WEIGHTS).is_file():
        return "", {}
    return str(read_config(folder / FOLDER).get("class_path", "")), load_file(folder / FOLDER / WEIGHTS)


def describe(length: LengthPolicy) -> dict[str, Any]:
    """Class path, plain settings and a phrase."""
    kind = type(length)
    settings = {
        name: value
        for name, value in vars(length).items()
        if not name.startswith("_") and name != "training" and isinstance(value, int | float | str | bool)
    }
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "settings": settings, "about": length.describe()}
