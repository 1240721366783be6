"""One cell of a benchmark: one policy at one load on one set of prompts, as one row of plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from adaflash.bench.booked import Booked, plain_seconds
from adaflash.bench.contenders import Contender
from adaflash.bench.gain import GainRow, row, tally
from adaflash.bench.interval import bootstrap
from adaflash.bench.machine import Watch
from adaflash.bench.prompt_sets import PromptSet
from adaflash.bench.runs import Group, shorter, take_turns
from adaflash.bench.stream import Streamed, play
from adaflash.decoding.engine import Engine
from adaflash.decoding.stats import OVERALL
from adaflash.decoding.tally import Tally
from adaflash.length.cost_table import CostTable
from adaflash.length.fixed import FixedLength
from adaflash.module import AdaFlashModule
from adaflash.types import Prompt, Request

FEWEST_GROUPS = 3  # below which there is no interval
ACCOUNTED = 0.97  # share of the wall time that the parts of a round must explain


@dataclass(frozen=True)
class Scale:
    """How much is decoded."""

    max_new_tokens: int = 64
    num_prompts: int = 24  # reported prompts a load, if there are as many; at least 3 groups of `load`
    rounds: int = 1

    def groups(self, prompts: Sequence[Prompt], load: int) -> list[Group]:
        """Groups of `load` requests, domains mixed, no prompt twice; fewer than three give no interval."""
        wanted = max(FEWEST_GROUPS, -(-self.num_prompts // load))
        some = [self.request(prompt) for prompt in prompts[: load * min(wanted, len(prompts) // load)]]
        return [Group(OVERALL, some[at : at + load]) for at in range(0, len(some), load)]

    def request(self, prompt: Prompt) -> Request:
        """Greedy."""
        return Request(prompt.tokens, self.max_new_tokens, prompt.id, prompt.domain)


@dataclass
class Stage:
    """Everything the cells of one load and prompt set share."""

    module: AdaFlashModule
    costs: CostTable
    prompts: PromptSet
    load: int
    scale: Scale
    tell: Callable[[int], None] = lambda done: None  # groups done
    plain: Engine = field(init=False)
    best: tuple[int, dict[int, float]] | None = None  # best fixed length, modelled seconds of each that was tried

    def __post_init__(self) -> None:
        self.plain = Engine(self.module.target, lanes=self.load)

    def tuning(self) -> list[Request]:
        """As many prompts of the half that is not reported as are decoded at once; four at least, where there are."""
        return [self.scale.request(each) for each in self.prompts.tune[: max(self.load, 4)]]

    def measure(self, contender: Contender, lengths: Sequence[int] = ()) -> dict[str, Any]:
        """Warm up, take turns with plain decoding group by group, and say what came out."""
        watch, began = Watch(), time.monotonic()
        booked = self._policy(contender, lengths)
        drafted = self._engine(booked) if booked else self.plain
        for engine in (self.plain, drafted):
            if not engine.passes["verify"]:
                play(engine, [shorter(each) for each in self.tuning()[: self.load]])
        if booked and contender.name.startswith("cost"):
            play(drafted, self.tuning())  # its books open on prompts that are not reported
        groups = self.scale.groups(self.prompts.report, self.load)
        modelled = 0.0
        for done, group in enumerate(groups, start=1):
            before = booked.seconds if booked else 0.0
            take_turns(group, self.plain, drafted, self.scale.rounds, play)  # type: ignore[arg-type]
            modelled += (booked.seconds - before) / (2 * self.scale.rounds) if booked else 0.0
            self.tell(done)
        found = row(OVERALL, groups)
        told = self._told(found, groups, modelled)
        lines = {"policy": contender.name, "described": booked.describe() if booked else "plain"}
        tuned = self.best if contender.name == "fixed" else None
        extra = (
            {"tuned": {"best": tuned[0], "modelled_seconds": tuned[1], "prompts": len(self.tuning())}} if tuned else {}
        )
        about = {"machine": watch.seen().as_json(), "seconds": time.monotonic() - began}
        return {**lines, **told, **extra, **about, "made": datetime.now(UTC).isoformat(timespec="seconds")}

    def best_fixed(self, lengths: Sequence[int]) -> int:
        """The length with the least modelled seconds (counts x cost table) on prompts that are not reported."""
        if self.best is None:
            seconds = {}
            for length in lengths:
                booked = Booked(FixedLength(length), self.costs)
                play(self._engine(booked), self.tuning())
                seconds[length] = booked.seconds
            self.best = min(seconds, key=seconds.__getitem__), seconds
        return self.best[0]

    def _policy(self, contender: Contender, lengths: Sequence[int]) -> Booked | None:
        if contender.make is None:
            return None
        length = self.best_fixed(lengths) if contender.name == "fixed" else 0
        return Booked(contender.make(length), self.costs)

    def _engine(self, policy: Booked) -> Engine:
        return Engine(self.module.target, self.module.drafter, policy, lanes=self.load)

    def _told(self, found: GainRow, groups: Sequence[Group], modelled: float) -> dict[str, Any]:
        fields = asdict(found)
        del fields["domain"], fields["tally"], fields["interval"]
        plain = sum(plain_seconds(self.costs, group.plain[0].trajectories) for group in groups)
        return {
            "load": self.load,
            "groups": len(groups),
            "numbers": found.tally.numbers(),
            "counts": found.tally.counts(),
            "domains": {name: each.numbers() for name, each in by_domain(groups).items()},
            **fields,
            "interval": found.interval,
            "window": {side: window_speed(groups, side) for side in ("plain", "drafted")},
            "window_interval": bootstrap(groups, window_ratio),
            "latency": {side: latencies(groups, side) for side in ("plain", "drafted")},
            "modelled_ratio": plain / modelled if modelled else None,
        }


def by_domain(groups: Sequence[Group]) -> dict[str, Tally]:
    """Tallies of the drafted runs by domain of the requests."""
    texts = [each for group in groups for run in group.drafted for each in run.trajectories]
    return {name: tally([t for t in texts if t.domain == name]) for name in sorted({t.domain for t in texts})}


def window_speed(groups: Sequence[Group], side: str) -> float | None:
    """Tokens per second while all lanes were busy; None where they never were for a whole round."""
    windows = [run.window for group in groups for run in getattr(group, side) if isinstance(run, Streamed)]
    seconds = sum(window[1] for window in windows)
    return sum(window[0] for window in windows) / seconds if seconds else None


def window_ratio(groups: Sequence[Group]) -> float | None:
    """Drafted over plain."""
    drafted, plain = window_speed(groups, "drafted"), window_speed(groups, "plain")
    return drafted / plain if drafted and plain else None


def latencies(groups: Sequence[Group], side: str) -> dict[str, float]:
    """Seconds from admission: median to the first token, median and 95th percentile to the last."""
    runs = [run for group in groups for run in getattr(group, side) if isinstance(run, Streamed)]
    first, last = (sorted(at for run in runs for at in getattr(run, name)) for name in ("first", "latency"))
    return {"first": median(first), "median": median(last), "p95": last[int(0.95 * (len(last) - 1))]}


def verdict(found: dict[str, Any], band: float) -> str:
    """`no gain` below 1; `gain` where the interval excludes 1 and the effect exceeds the A/A band; else `unclear`."""
    ratio, interval = found.get("ratio"), found.get("interval")
    if ratio is None:
        return "not measured"
    if ratio < 1:
        return "no gain"
    return "gain" if interval and interval[0] > 1 and ratio - 1 > band else "unclear"


def band_of(plain: dict[str, Any]) -> float:
    """What the A/A row calls equal: the farthest end of its interval from 1, or its ratio's distance."""
    ends = [plain.get("ratio"), *(plain.get("interval") or ())]
    return max((abs(end - 1) for end in ends if end is not None), default=0.0)
