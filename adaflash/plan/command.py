"""`adaflash plan`: what a run of `fit` will take on each device, from its configuration, before anything is loaded."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser

from adaflash.configuration import expand
from adaflash.errors import UserError
from adaflash.plan.advice import advise
from adaflash.plan.estimate import estimate
from adaflash.plan.job import Job, job_of
from adaflash.plan.layout import Layout, layout_of
from adaflash.plan.meter import nbytes
from adaflash.plan.show import as_json, show
from adaflash.trainer_cli import TrainerCLI

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SWITCHES = ("--json",)


def main(words: Sequence[str]) -> int:
    """Plan the configuration that `fit` would be given; returns the exit status 0.

    Raises:
        UserError: what `fit` would refuse, a device count that only the machine knows, or a size that is none.
    """
    job, options, memory = parse(words)
    plan = estimate(job)
    changes = advise(job, memory) if memory else []
    if options.json:
        print(json.dumps(as_json(job, plan, memory, changes)))
    else:
        show(job, plan, memory, changes)
    return 0


def parse(words: Sequence[str]) -> tuple[Job, Any, int]:
    """The job of a command line, its settings, and the memory of a device (0: not known)."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    given = [f"{word}=true" if word in SWITCHES else word for word in expand(words)]
    sys.argv = ["adaflash plan", *given]
    cli = PlanCLI(run=False)
    settings, model = cli.config, cli.model
    memory = bytes_of(settings.memory) if settings.memory else _here(settings.trainer)
    job = job_of(model, cli.datamodule, settings.trainer, Layout())
    weights = nbytes(list(job.models.target.model.parameters()))
    layout = layout_of(settings.trainer, model.parallel, weights, memory, settings.devices, settings.nodes)
    return replace(job, layout=layout), settings, memory


class PlanCLI(TrainerCLI):
    """Reads the configuration of `fit`, and builds model and data as it does, but no trainer."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What `fit` takes, and the machine."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--devices", type=int, default=0, help="Devices of a node; 0: trainer.devices.")
        parser.add_argument("--nodes", type=int, default=0, help="Nodes; 0: trainer.num_nodes.")
        parser.add_argument("--memory", type=str, default="", help="Memory of one device, such as 80GiB.")
        parser.add_argument("--json", type=bool, default=False, help="One JSON object instead of the table.")

    def _set_seed(self) -> None:
        """Nothing is drawn."""

    def instantiate_classes(self) -> None:
        """Model and data alone: constructors are cheap, and a trainer would ask for the devices."""
        try:
            built = self.parser.instantiate_classes(self.config)
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        self.model, self.datamodule = built.model, built.data


def bytes_of(text: str) -> int:
    """80GiB, 80GB, 81920MiB or plain bytes.

    Raises:
        UserError: none of these.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        size = round(float(found[1]) * UNITS[found[2]]) if found else 0
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise UserError(f"--memory {text!r} is no size; write it as 80GiB, 80GB or in bytes")
    return size


def _here(trainer: Any) -> int:
    """Memory of this machine's own device, if it has one of the kind that is planned for."""
    if trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory
