"""What a run folder holds, read tolerantly: a run that was killed, or has only begun, is a run with notes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from adaflash.bench import drafts, rows
from adaflash.bench.history import FILE as ACCEPTANCE
from adaflash.bench.history import Entry, History
from adaflash.errors import UserError
from adaflash.run import origin

OURS = ("config.yaml", ACCEPTANCE, "gain.json", rows.FILE, "checkpoints")
Series = dict[int, float]  # by update
Found = TypeVar("Found")


@dataclass
class Run:
    """One run. Everything but the folder may be missing; `notes` say what is and why."""

    name: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    validations: list[Entry] = field(default_factory=list)  # of the newest training in the folder, one for each update
    metrics: dict[str, Series] = field(default_factory=dict)
    gain: dict[str, Any] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)  # the newest row of each cell
    reliability: list[dict[str, str]] = field(default_factory=list)
    samples: list[drafts.Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> dict[str, Any]:
        """The model's part of the config."""
        found = self.config.get("model")
        return found if isinstance(found, dict) else {}

    @property
    def target(self) -> str:
        """Name of the target; empty if nothing tells."""
        made_for = self.origin.get("made_for") or {}
        return str(self.config.get("target") or self.model.get("target") or made_for.get("target") or "")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every folder once, named as briefly as can be told apart.

    Raises:
        UserError: a folder that does not exist, or holds no run; names it and what was looked for.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = _names(unique)
    runs = [read_run(folder, name) for folder, name in zip(unique, names, strict=True)]
    if len(unique) < len(folders):
        runs[0].notes.append("A folder was given more than once; it is shown once.")
    return runs


def read_run(folder: Path, name: str) -> Run:
    """All that is there."""
    check(folder)
    run = Run(name, folder)
    run.config = _try(run, "config.yaml", lambda path: _mapping(yaml.safe_load(path.read_text())), {})
    run.gain = _try(run, "gain.json", lambda path: _mapping(json.loads(path.read_text())), {})
    run.validations = _validations(run)
    run.metrics = _metrics(run)
    run.bench = _try(run, rows.FILE, _newest, [])
    run.reliability = _try(run, "reliability.csv", _table, [])
    run.samples = _try(run, drafts.FILE, drafts.read, [])
    run.origin = _origin(run)
    if not run.config:
        run.config = _mapping(run.origin.get("config"))
    run.notes += _missing(run)
    return run


def check(folder: Path) -> None:
    """Whether it is a run at all; raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a run (--run of `adaflash fit`)")
    found = [name for name in OURS if (folder / name).exists()]
    if not found or (
        found == ["config.yaml"] and "adaflash." not in (folder / "config.yaml").read_text(errors="replace")
    ):
        inner = [path.parent for path in folder.glob(f"*/{ACCEPTANCE}")]
        hint = f". Did you mean {inner[0]}?" if inner else ""
        raise UserError(f"{folder} holds no run of `adaflash fit`: there is none of {', '.join(OURS)}{hint}")


def _validations(run: Run) -> list[Entry]:
    """Of the newest training; the last one of each update; those of `adaflash test` where there is no other."""
    entries: list[Entry] = _try(run, ACCEPTANCE, lambda path: History(path.parent).read(), [])
    stage = "val" if any(entry.stage == "val" for entry in entries) else "test"
    mine = [entry for entry in entries if entry.stage == stage and entry.run == entries[-1].run]
    return sorted({entry.step: entry for entry in mine}.values(), key=lambda entry: entry.step)


def _metrics(run: Run) -> dict[str, Series]:
    """Scalars by name, of all parts of a run that was resumed."""
    parts = sorted(run.folder.glob("metrics.*.csv"), key=lambda path: (len(path.name), path.name))
    found: dict[str, Series] = {}
    for path in [*parts, run.folder / "metrics.csv"]:
        table: list[dict[str, str]] = _try(run, path.name, _table, [])
        for row in table:
            if (step := _number(row.get("step"))) is None:
                continue
            for name, text in row.items():
                if name not in ("step", "epoch") and (value := _number(text)) is not None:
                    found.setdefault(name, {})[int(step)] = value
    return found


def _origin(run: Run) -> dict[str, Any]:
    """Provenance beside the checkpoints, or out of one."""
    beside = run.folder / "checkpoints" / "provenance.json"
    told: dict[str, Any] = _try(
        run, "checkpoints/provenance.json", lambda path: _mapping(json.loads(path.read_text())), {}
    )
    if beside.is_file() and told:
        return {**told, "config": _mapping(yaml.safe_load(str(told.get("config") or "")))}
    try:
        return origin(run.folder)
    except UserError as error:
        run.notes.append(f"No checkpoint tells where this run comes from ({error}).")
        return {}


def _missing(run: Run) -> list[str]:
    notes = []
    if not run.validations:
        notes.append(
            "No validation was recorded: the run was stopped before its first one, or has no acceptance monitor."
        )
    elif len(run.validations) == 1:
        notes.append("Only one validation was recorded: there is no change to show.")
    if not run.gain:
        notes.append("No gain was measured: the run was stopped before its end. adaflash validate measures it.")
    return notes


def _try(run: Run, name: str, read: Callable[[Path], Found], otherwise: Found) -> Found:
    """What a file says; a note where it is damaged."""
    path = run.folder / name
    if not path.is_file():
        return otherwise
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, csv.Error, yaml.YAMLError) as error:
        run.notes.append(f"{name} cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:120]}).")
        return otherwise


def _newest(path: Path) -> list[dict[str, Any]]:
    """The newest row of each cell, in order; of the newest checkpoint alone."""
    found = rows.Rows(path).read()
    cells = {json.dumps(row["key"], sort_keys=True): row for row in found}
    return [row for row in cells.values() if row["key"]["checkpoint"] == found[-1]["key"]["checkpoint"]]


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return [{name: text or "" for name, text in row.items() if name} for row in csv.DictReader(file)]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]
