"""What the doctor looks at: a target, and whatever of drafter, run and data there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaflash.drafters.dflash import DFlash
from adaflash.export.manifest import read_manifest
from adaflash.export.own import load_drafter, load_length
from adaflash.export.probe import Probe, read_probe
from adaflash.export.spec import DraftSpec, read_spec
from adaflash.export.weights import find_folder, read_config
from adaflash.length.base import LengthPolicy
from adaflash.targets.hf import HFTarget, TargetOptions

if TYPE_CHECKING:
    from adaflash.data.prompts import PromptDataModule


@dataclass
class Patient:
    """Filled as far as loading succeeds."""

    target: HFTarget
    drafter: DFlash | None = None
    length: LengthPolicy | None = None
    folder: Path | None = None  # of a drafter that lies in files
    spec: DraftSpec | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    data: PromptDataModule | None = None
    mask_token: str = ""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Switches of the template in force: those of the data, else those the drafter was trained with."""
        if self.data is not None:
            return dict(self.data.template_kwargs)
        return dict((self.manifest.get("template") or {}).get("kwargs") or {})


def load_target(name: str, dtype: str, mask_token: str) -> Patient:
    """A patient with a target only. Raises UserError."""
    options = TargetOptions(dtype=dtype, mask_token=mask_token)  # type: ignore[arg-type]
    return Patient(HFTarget.load(name, options), mask_token=mask_token)


def add_drafter(patient: Patient, name: str) -> None:
    """A drafter from files. Raises UserError with the first thing that is wrong with it."""
    patient.folder = find_folder(name)
    patient.manifest, patient.probes = read_manifest(patient.folder), read_probe(patient.folder)
    patient.drafter, head = load_drafter(name, patient.target)
    patient.spec = read_spec(patient.folder, read_config(patient.folder))
    if head:
        patient.length = load_length(head, patient.target, patient.drafter.block_size)


def from_run(checkpoint: str, target: str) -> Patient:
    """A patient from a checkpoint of `adaflash fit`. Raises UserError."""
    from adaflash.export.source import open_source

    source = open_source(checkpoint, target)
    patient = Patient(source.target, source.drafter, source.length)
    if source.origin.template_kwargs:
        patient.manifest = {"template": {"kwargs": source.origin.template_kwargs}}
    return patient
