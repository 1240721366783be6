"""docs/write-your-own.md as written: the five files and the YAML in one fit, and each of them by a number."""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaflash.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "write-your-own.md").read_text()


def files() -> dict[str, str]:
    """The fenced blocks: Python by the name in its first line, and the YAML."""
    found = {re.match(r"# (\w+\.py)\n", text)[1]: text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}  # type: ignore[index]
    [config] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return {**found, "mine.yaml": config}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in files():
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def test_all_of_them_in_one_fit(words: list[str], written: Path) -> None:
    with sqlite3.connect(written / "requests.db") as database:
        database.execute("CREATE TABLE requests (prompt TEXT)")
        database.executemany("INSERT INTO requests VALUES (?)", [("How do I pay?",), ("",), ("Where is it?",)])
    assert main(["fit", *words, "-c", "mine.yaml"]) == 0
    with (written / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name: [row[name] for row in rows if row[name]] for name in rows[0]}
    assert 0 < float(logged["loss/js"][0]) <= math.log(2)
    assert {"val/whole_blocks/chat", "val/whole_blocks/code", "val/whole_blocks/math"} <= set(logged)
    assert "SharedBudget(64)" in (written / "run" / "gain.json").read_text()
    told = json.loads((written / "run" / "checkpoints" / "provenance.json").read_text())["data"]["train"]
    [mine] = [source for source in told if source["kind"] == "SqliteSource"]
    assert (mine["rows"], mine["domains"]) == (2, ["support"])  # the empty one is dropped


def test_each_by_a_number(written: Path) -> None:
    made: dict[str, Any] = {name: importlib.import_module(f"my_{name}") for name in ("loss", "weight", "length")}
    loss = made["loss"].JensenShannon()
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    by_hand = 0.5 * (
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3) + 0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3)
    )
    assert loss(student, teacher, None).item() == pytest.approx(by_hand, abs=1e-6)
    supervised = torch.tensor([[True, True, True, True, False]])
    assert made["weight"].Plateau(2)(supervised).tolist() == [[1.0, 1.0, 0.5, 0.25, 0.0]]
    limits = SimpleNamespace(limits=torch.tensor([3, 7, 7, 1]))
    assert made["length"].SharedBudget(20).choose(limits).tolist() == [3, 5, 5, 1]
