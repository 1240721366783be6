"""Which cells a benchmark has, and roughly how long they take."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.bench.cells import Scale, Stage
from adaflash.bench.contenders import Contender
from adaflash.bench.prompt_sets import PromptSet
from adaflash.bench.rows import Row
from adaflash.length.cost_table import CostTable
from adaflash.module import AdaFlashModule


@dataclass(frozen=True)
class Cell:
    """What is measured, and how it is known in the file of rows."""

    stage: Stage
    contender: Contender
    key: Row

    @property
    def groups(self) -> int:
        """How many groups of prompts take their turns."""
        return len(self.stage.scale.groups(self.stage.prompts.report, self.stage.load))

    @property
    def seconds(self) -> float:
        """By the cost table: four runs a group, a drafted one taking as long as a plain one."""
        stage, seconds = self.stage, 0.0
        for group in stage.scale.groups(stage.prompts.report, stage.load):
            rows = sum(len(each.prompt) for each in group.requests)
            prefill = stage.costs.seconds(rows, stage.load, stage.costs.contexts[0])
            step = stage.costs.seconds(stage.load, stage.load, rows // stage.load)
            seconds += 4 * stage.scale.rounds * (stage.scale.max_new_tokens * step + prefill)
        return seconds

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.contender.name}, {self.stage.load} at once, {self.stage.prompts.name}"


def stages_of(
    module: AdaFlashModule, costs: CostTable, sets: Sequence[PromptSet], loads: Sequence[int], scale: Scale
) -> tuple[list[Stage], list[str]]:
    """One stage for each set and load, and which loads have too few prompts: none is decoded twice to make up for it."""
    stages, skipped = [], []
    for prompts in sets:
        for load in loads:
            if len(prompts.report) < load:
                skipped.append(
                    f"{prompts.name}: {load} at once needs as many prompts, it reports {len(prompts.report)}"
                )
            else:
                stages.append(Stage(module, costs, prompts, load, scale))
    return stages, skipped


def cells_of(stages: Sequence[Stage], playable: Sequence[Contender], file: Path, lengths: Sequence[int]) -> list[Cell]:
    """Every cell; its key holds all that its numbers depend on, but for the machine's mood."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    cells = []
    for stage in stages:
        same = {"checkpoint": digest, "threads": torch.get_num_threads(), "device": str(stage.module.target.device)}
        same |= {**vars(stage.scale), "set": stage.prompts.name, "prompts": stage.prompts.digest, "load": stage.load}
        for each in playable:
            tried = {"fixed": list(lengths)} if each.name == "fixed" else {}
            cells.append(Cell(stage, each, {**same, "policy": each.name, **tried}))
    return cells


def plan(cells: Sequence[Cell], todo: Sequence[Cell]) -> str:
    """What will run, and roughly how long."""
    names = dict.fromkeys(cell.contender.name for cell in cells)
    loads = dict.fromkeys(str(cell.stage.load) for cell in cells)
    sets = dict.fromkeys(cell.stage.prompts.name for cell in cells)
    left = f"{len(cells) - len(todo)} have rows already" if len(todo) < len(cells) else "none has a row yet"
    busy = f"load now {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return (
        f"{len(cells)} cells ({', '.join(names)}; {', '.join(loads)} at once; {', '.join(sets)}), {left}; "
        f"about {duration(sum(cell.seconds for cell in todo))} on a quiet machine ({busy})"
    )


def duration(seconds: float) -> str:
    """Seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
