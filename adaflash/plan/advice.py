"""What to change where a plan does not fit: keys and values, each tried by planning again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from adaflash.plan.estimate import PHASES, estimate
from adaflash.plan.job import Job

HEADROOM = 0.9
"""Share of a device's memory that may be planned: the rest is the driver's context, kernels' own scratch memory, buffers
of the network library and gaps between allocations, none of which are counted."""


@dataclass(frozen=True)
class Change:
    """One setting, and what the run would take with it."""

    flags: str
    job: Job
    peak: int


Steps = Callable[[Job], Iterator[tuple[Job, str]]]
"""Jobs with a setting changed, further and further, each with the flags that say so."""


@dataclass(frozen=True)
class Lever:
    """A setting that saves memory in some phases."""

    steps: Steps
    phases: tuple[str, ...]


def halved(key: str, name: str, floor: int, along: Callable[[Job, int], tuple[Job, str]] | None = None) -> Steps:
    """The field `name` of the job halved, quartered, ... down to a floor; `along` changes what must change with it."""

    def steps(job: Job) -> Iterator[tuple[Job, str]]:
        value = getattr(job, name)
        while (value := value // 2) >= floor:
            changed, also = (job, "") if along is None else along(job, value)
            yield replace(changed, **{name: value}), f"--{key} {value}{also}"

    return steps


def _same_update(job: Job, batch: int) -> tuple[Job, str]:
    """More micro-batches in place of larger ones: the update stays what it is."""
    times = job.accumulate * job.batch_size // batch
    return replace(job, accumulate=times), f" --trainer.accumulate_grad_batches {times}"


def _recomputed(job: Job) -> Iterator[tuple[Job, str]]:
    if not job.recompute:
        yield replace(job, recompute=True), "--model.parallel.recompute true"


def _sharded_drafter(job: Job) -> Iterator[tuple[Job, str]]:
    if job.layout.ranks > job.layout.drafter_parts:
        layout = replace(job.layout, drafter_parts=job.layout.ranks, strategy="fsdp2")
        yield replace(job, layout=layout), "--trainer.strategy fsdp2"


def _sharded_target(job: Job) -> Iterator[tuple[Job, str]]:
    layout = job.layout
    for place, parts in (("node", layout.devices), ("world", layout.ranks)):
        if parts > layout.target_parts:
            yield replace(job, layout=replace(layout, target_parts=parts)), f"--model.parallel.target {place}"


DECODES, LEARNS, ALWAYS = ("rollout",), ("update",), PHASES
LEVERS = (
    Lever(_recomputed, LEARNS),
    Lever(_sharded_drafter, ALWAYS),
    Lever(_sharded_target, ("update", "step")),
    Lever(halved("data.batch_size", "batch_size", 1, _same_update), LEARNS),
    Lever(halved("model.num_anchors", "num_anchors", 16), LEARNS),
    Lever(halved("model.chunk_rows", "chunk_rows", 32), LEARNS),
    Lever(halved("model.rollout.init_args.lanes", "lanes", 1), DECODES),
    Lever(halved("data.rollout_size", "rollout_size", 1), ALWAYS),
    Lever(halved("model.rollout.init_args.max_new_tokens", "response", 64), ALWAYS),
    Lever(halved("data.max_prompt_tokens", "max_prompt", 64), ALWAYS),
    Lever(halved("model.lanes", "val_lanes", 1), ("validation",)),
)
"""What can be changed, and the phases in which that saves memory; first what leaves the run as it is."""


def advise(job: Job, memory: int) -> list[Change]:
    """Single settings with which the job fits, each at its largest value that does; if there is none, settings that do
    so together, in the order of what they save. Empty if it fits as it is, or cannot be made to fit by settings alone.
    """
    limit, plan = round(memory * HEADROOM), estimate(job)
    if plan.peak <= limit:
        return []
    over = {phase for phase in ALWAYS if plan.total(phase) > limit}
    useful = [lever for lever in LEVERS if over & {*lever.phases}]
    found = (_first_that_fits(lever, job, limit) for lever in useful if over <= {*lever.phases})
    return [change for change in found if change] or _together(useful, job, plan.peak, limit)


def _first_that_fits(lever: Lever, job: Job, limit: int) -> Change | None:
    """The largest value with which the job fits; None where even the smallest does not."""
    steps = list(_allowed(lever, job))
    if not steps or _change(*steps[-1]).peak > limit:
        return None
    first = bisect_left(steps, True, key=lambda step: _change(*step).peak <= limit)
    return _change(*steps[first])


def _together(levers: Sequence[Lever], job: Job, peak: int, limit: int) -> list[Change]:
    """One halving after another, always that which saves most, until it fits or nothing more is saved."""
    if estimate(_least(levers, job)).peak > limit:
        return []
    chosen: dict[int, Change] = {}
    while peak > limit:
        steps = [(lever, next(_allowed(lever, job), None)) for lever in levers]
        tried = [(lever, _change(*step)) for lever, step in steps if step]
        saving = [(lever, change) for lever, change in tried if change.peak < peak]
        if not saving:
            return []
        lever, best = min(saving, key=lambda pair: pair[1].peak)
        chosen.pop(id(lever), None)
        chosen[id(lever)] = best
        job, peak = best.job, best.peak
    return list(chosen.values())


def _least(levers: Sequence[Lever], job: Job) -> Job:
    """The job with every setting at its smallest value."""
    for lever in levers:
        job = next((changed for changed, _ in reversed(list(_allowed(lever, job)))), job)
    return job


def _change(job: Job, flags: str) -> Change:
    return Change(flags, job, estimate(job).peak)


def _allowed(lever: Lever, job: Job) -> Iterator[tuple[Job, str]]:
    """Steps that the data module takes: a rollout is a whole number of batches."""
    for changed, flags in lever.steps(job):
        if changed.rollout_size % changed.batch_size == 0:
            yield replace(changed, lanes=min(changed.lanes, changed.rollout_size)), flags
