"""docs/watch-a-run.md names configs, pictures and keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from adaflash.configuration import PACKAGED, find, shipped

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "watch-a-run.md").read_text()


def test_overlays_pictures_and_keys_exist() -> None:
    overlays = re.findall(r"^\| `(monitor/\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(overlays) == sorted(name for name in shipped() if name.startswith("monitor/"))
    assert all(find(name).is_file() for name in overlays)
    assert all((DOCS / picture).is_file() for picture in re.findall(r"!\[.*?\]\((.*?)\)", PAGE))
    base = yaml.safe_load((PACKAGED / "base.yaml").read_text())
    [named] = re.findall(r"can drop: (.*?)\.", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", named)) == set(base) & {"acceptance", "gain", "nan_guard", "last", "best"}
