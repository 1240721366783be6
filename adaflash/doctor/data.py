"""Checks of the data: can every source be read, and how much of it can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adaflash.configuration import read
from adaflash.data.prompts import PromptDataModule
from adaflash.doctor.patient import Patient
from adaflash.doctor.report import Check, ok
from adaflash.errors import UserError


def load_data(files: Sequence[Path], target: str) -> PromptDataModule:
    """The data module of config files, later ones win; whatever else they hold is left alone. Raises UserError."""
    from jsonargparse import ArgumentParser

    merged: dict[str, Any] = {}
    for file in files:
        merged = _over(merged, read(file).get("data") or {})
    if not merged:
        raise UserError(f"-c {' '.join(map(str, files))}: no `data:` in it; name your sources there")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    try:
        parsed = parser.parse_object({"data": {**merged, "target": target}})
        return parser.instantiate(parsed).data
    except UserError:
        raise
    except Exception as error:  # whatever a misspelt key or a class that is not there raises
        raise UserError(f"-c {' '.join(map(str, files))}: data: {error}") from error


def check_data(patient: Patient) -> Iterator[Check]:
    """Every source of training and validation."""
    assert patient.data is not None
    for name, stage in (("data.train", "fit"), ("data.val", "validate")):
        role = name.removeprefix("data.")
        if role == "train" and not patient.data.sources["train"]:
            yield Check(name, "warn", "no source", "name some in data.train; without them only validation runs")
            continue
        try:
            patient.data.setup(stage)
        except UserError as error:
            yield Check(name, "fail", str(error))
            continue
        reports = [pool.source.report for pool in patient.data.pools.get(role, []) if pool.source.report]
        kept, dropped = sum(r.kept for r in reports), sum(r.dropped for r in reports)
        why = "; ".join(str(report) for report in reports if report.dropped)
        found = f"{kept} prompts" + (f", {dropped} dropped: {why}" if dropped else "")
        yield Check(name, "warn", found, "mend or filter these rows") if dropped > kept / 10 else ok(name, found)
    for key in patient.data.renderer.unknown_switches():
        yield Check(
            "template switch", "warn", f"the template never mentions {key!r}", "is it misspelt in data.template_kwargs?"
        )


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mappings merged; lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged
