"""A plan as people read it, and as programs do."""

from __future__ import annotations

import sys
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from adaflash.plan.advice import HEADROOM, Change
from adaflash.plan.counts import counts_of
from adaflash.plan.estimate import PHASES, Plan
from adaflash.plan.job import Job

GIB = 2**30
PIPED = 150  # columns where there is no screen


def as_json(job: Job, plan: Plan, memory: int, changes: list[Change]) -> dict[str, Any]:
    """Everything that is shown; bytes, unrounded."""
    return {
        "parts": {part.name: {"what": part.what, **part.phases} for part in plan.parts},
        "totals": {phase: plan.total(phase) for phase in PHASES},
        "peak": plan.peak,
        "worst_phase": plan.worst,
        "memory": memory or None,
        "fits": plan.peak <= memory * HEADROOM if memory else None,
        "changes": [{"flags": each.flags, "peak": each.peak} for each in changes],
        "counts": counts_of(job),
        "devices": job.layout.devices,
        "nodes": job.layout.nodes,
        "strategy": job.layout.strategy,
    }


def show(job: Job, plan: Plan, memory: int, changes: list[Change], console: Console | None = None) -> None:
    """The table, the verdict, what to change, and how much work it is."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPED)
    layout = job.layout
    where = f"{layout.nodes} x {layout.devices} devices, {layout.strategy}" if layout.ranks > 1 else "one device"
    table = Table(title=f"GiB a device, by phase ({where}, {job.precision})", title_justify="left",
                  box=HEAVY_HEAD if console.is_terminal else None)  # fmt: skip
    table.add_column("part")
    table.add_column("what")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for part in plan.parts:
        table.add_row(part.name, part.what, *(_cell(part.phases.get(phase, 0)) for phase in PHASES))
    table.add_section()
    table.add_row("total", "", *(_cell(plan.total(phase)) for phase in PHASES))
    console.print(table)
    for line in [*verdict(plan, memory, changes), *_work(job)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def verdict(plan: Plan, memory: int, changes: list[Change]) -> list[str]:
    """Whether it fits, and what to change if it does not."""
    need = f"{_gib(plan.peak)} at most ({plan.worst})"
    if not memory:
        return [f"Needs {need}. Say --memory 80GiB to hear whether that fits, and what to change."]
    usable = f"{_gib(memory)}, of which {HEADROOM:.0%} can be planned"
    if plan.peak <= memory * HEADROOM:
        return [f"Fits: {need} of {usable}."]
    lines = [f"DOES NOT FIT: {need} of {usable}."]
    if not changes:
        return [*lines, "No setting alone makes it fit: take a sharded strategy, more devices, or a smaller drafter."]
    alone = all(each.peak <= memory * HEADROOM for each in changes)
    lines.append("It would fit with any one of" if alone else "It would fit with all of")
    return [*lines, *(f"  {each.flags}   ({_gib(each.peak)}{'' if alone else ' so far'})" for each in changes)]


def _work(job: Job) -> list[str]:
    """Lines about tokens and prompts."""
    n = {name: round(value) for name, value in counts_of(job).items()}
    return [
        f"An update: {n['trajectories_per_update']:,} trajectories, up to {n['candidates_per_update']:,} supervised "
        f"candidates ({n['drafter_tokens_per_update']:,} drafter tokens, {n['response_tokens_per_update']:,} tokens of "
        "responses).",
        f"The run: {n['updates']:,} updates over {n['prompts']:,} prompts (each used {job.reuse} times), up to "
        f"{n['candidates']:,} supervised candidates and {n['response_tokens']:,} tokens decoded.",
        "Lengths are the longest allowed, so rollouts that end early take less. Not counted: the driver, kernels' own "
        "scratch memory, network buffers, gaps between allocations.",
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _cell(size: int) -> str:
    return f"{size / GIB:.3f}" if size else "-"
