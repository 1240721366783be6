"""`adaflash doctor`: one line per check, a remedy with each that is not well, and an exit status by severity."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from adaflash.doctor import data as data_checks
from adaflash.doctor import drafter as drafter_checks
from adaflash.doctor import machine, probing
from adaflash.doctor import target as target_checks
from adaflash.doctor.patient import Patient, add_drafter, from_run, load_target
from adaflash.doctor.report import Check, as_json, exit_status, run_checks
from adaflash.errors import UserError
from adaflash.flags import bare_switches

Group = tuple[str, Callable[[], Iterable[Check]]]


def main(words: Sequence[str]) -> int:
    """The command line: `-c` names data configs, everything else is `doctor`'s."""
    from jsonargparse import auto_cli

    from adaflash.configuration import expand

    rest, files = [], []
    expanded = iter(expand(list(words)))
    for word in expanded:
        if word == "--config":
            files.append(next(expanded, ""))
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    given = [f"--data={json.dumps(files)}"] if files else []
    given = [*bare_switches(doctor, rest), *given]
    return int(auto_cli(doctor, args=given, as_positional=False, prog="adaflash doctor"))


def doctor(
    target: str = "",
    drafter: str = "",
    checkpoint: str = "",
    data: list[str] = [],  # noqa: B006  (never changed; jsonargparse reads the type from it)
    json: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    mask_token: str = "",
    decode: bool = True,
) -> int:
    """Find what would lower acceptance in silence. Exit status 0: well, 1: acceptance may suffer, 2: broken.

    Args:
        target: Fetched name, folder or Hub id; the run of a checkpoint knows its own.
        drafter: Folder or Hub id of an exported or foreign drafter.
        checkpoint: A checkpoint of `adaflash fit`, or the folder of a run.
        data: Config files with a `data:` section (`-c NAME` as for fit).
        json: Print one JSON object instead of lines.
        dtype: Number format in which the target is loaded.
        mask_token: Reserved special token of targets without a mask token or spare row (model.target_options.mask_token).
        decode: Also decode two short prompts and look at tau.
    """
    if not target and not checkpoint:
        raise UserError("give --target NAME (and --drafter FOLDER), or --checkpoint RUN")
    checks: list[Check] = []
    for check in examine(target, drafter, checkpoint, [Path(file) for file in data], dtype, mask_token, decode):
        checks.append(check)
        if not json:
            print(check.line(), flush=True)
    if json:
        print(_dumps(as_json(checks)))
    return exit_status(checks)


def examine(
    target: str, drafter: str, checkpoint: str, data: Sequence[Path], dtype: str, mask_token: str, decode: bool
) -> Iterable[Check]:
    """All checks, in the order in which one builds on the other; they stop where nothing more can be loaded."""
    if target:
        yield from run_checks([("memory", partial(machine.check_memory, target, dtype))])
    try:
        patient = from_run(checkpoint, target) if checkpoint else load_target(target, dtype, mask_token)
    except UserError as error:
        yield Check("target" if not checkpoint else "checkpoint", "fail", str(error))
        return
    for name, load in (
        ("drafter", partial(_drafter, patient, drafter)),
        ("data", partial(_data, patient, data, target)),
    ):
        yield from run_checks([(name, load)])
    yield from run_checks(groups(patient, decode))


def groups(patient: Patient, decode: bool) -> list[Group]:
    """The checks that this patient can be given."""
    found: list[Group] = [
        ("target", partial(target_checks.check_target, patient)),
        ("tokenizer", partial(target_checks.check_tokenizer, patient)),
        ("stop ids", partial(target_checks.check_stops, patient)),
        ("template", partial(target_checks.check_template, patient)),
        ("embedding", partial(target_checks.check_embedding, patient)),
        ("mask token", partial(target_checks.check_mask, patient)),
        ("disk", partial(machine.check_disk, patient.drafter, Path.cwd())),
    ]
    if patient.drafter is not None:
        each = ("layers", "block", "rope", "dtype", "origin", "head", "shipped_tokenizer")
        found += [(name, partial(getattr(drafter_checks, f"check_{name}"), patient)) for name in each]
        found += [("probe", partial(probing.check_probe, patient))]
        found += [("acceptance", partial(drafter_checks.check_acceptance, patient))] if decode else []
    if patient.data is not None:
        found += [("data", partial(data_checks.check_data, patient))]
    return found


def _drafter(patient: Patient, name: str) -> Iterable[Check]:
    if name:
        add_drafter(patient, name)
    if patient.drafter is not None:
        source = patient.spec.source if patient.spec else "a run of adaflash"
        size = sum(parameter.numel() for parameter in patient.drafter.parameters()) / 1e6
        layers = patient.drafter.num_layers
        yield Check("drafter", "ok", f"{name or 'of the checkpoint'}: {source}, {layers} layers, {size:.1f} M weights")


def _data(patient: Patient, files: Sequence[Path], target: str) -> Iterable[Check]:
    if files:
        patient.data = data_checks.load_data(files, target or str(patient.target.model.name_or_path))
    return []


def _dumps(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2)
