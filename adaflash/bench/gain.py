"""Speed with the drafter against plain decoding: same prompts, same machine, same engine, in one run.

Method (ENGINE section 6): each group of prompts is decoded plain, drafted, drafted, plain, so that a machine that gets
slower or faster does so for both; a warm-up is left out; medians of the repeats; an interval by bootstrap over groups.
The tokens of every run are compared: a speed that changes the text is no speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from adaflash.bench.interval import Interval, bootstrap
from adaflash.bench.runs import (
    DecodesRequests,
    Group,
    Run,
    decode,
    differences,
    failures,
    groups_of,
    shorter,
    take_turns,
)
from adaflash.decoding.stats import OVERALL
from adaflash.decoding.tally import Tally, count
from adaflash.types import Prompt, Trajectory


@dataclass(frozen=True)
class Speed:
    """Tokens per second: decode-only (prefill and first tokens left out) and end to end. None: nothing to divide."""

    decode: float | None
    end_to_end: float | None
    prefill_seconds: float  # per run of all groups


@dataclass(frozen=True)
class GainRow:
    """One domain. Ratios are drafted over plain; above 1 the drafter helps."""

    domain: str
    prompts: int
    identical: int  # prompts whose text was the same in every run
    differing: list[dict[str, object]]  # others: id and position of the first difference in the response
    failed: list[dict[str, object]]  # others: id and why it could not be served
    plain: Speed
    drafted: Speed
    ratio: float | None  # decode-only
    interval: Interval | None  # 95 %, by bootstrap over groups; None for fewer than three groups
    end_to_end_ratio: float | None
    noise: float | None  # plain against plain: |ratio - 1| of the first and the last runs; smaller effects are none
    tally: Tally  # of the drafted runs
    parts: dict[str, float]  # drafted seconds by part of the round, over all runs
    accounted: float  # share of the drafted wall time those parts explain

    @property
    def tau(self) -> float | None:
        """Tau of the drafted runs; None where nothing was drafted."""
        return self.tally.numbers().get("tau")

    @property
    def break_even_tau(self) -> float | None:
        """The tau at which drafting would be as fast as plain decoding, were a round to cost what it costs now."""
        return self.tau / self.ratio if self.tau and self.ratio else None

    @property
    def verdict(self) -> str:
        """`gain`, `no gain` (the ratio is below 1), or `unclear`: above 1 by less than the noise."""
        if self.ratio is None:
            return "not measured"
        if self.ratio < 1:
            return "no gain"
        certain = self.interval is None or self.interval[0] > 1
        return "gain" if certain and self.ratio - 1 > (self.noise or 0.0) else "unclear"


def measure_gain(
    plain_engine: DecodesRequests,
    draft_engine: DecodesRequests,
    prompts_by_domain: Mapping[str, Sequence[Prompt]],
    max_new_tokens: int,
    rounds: int = 1,
    group_size: int = 1,
) -> list[GainRow]:
    """Decode every prompt 2 * rounds times with each engine; one row per domain, and one for all of them.

    `group_size` is the load: how many requests are decoded at once (no more than the engines have lanes).
    """
    groups = groups_of(prompts_by_domain, max_new_tokens, group_size)
    if not groups:
        return []
    for engine in (plain_engine, draft_engine):
        decode(engine, [shorter(request) for request in groups[0].requests])
    for _ in range(rounds):
        for group in groups:
            take_turns(group, plain_engine, draft_engine)
    by_domain = {name: [group for group in groups if group.domain == name] for name in sorted(prompts_by_domain)}
    return [row(name, mine) for name, mine in {**by_domain, OVERALL: groups}.items() if mine]


def row(domain: str, groups: Sequence[Group]) -> GainRow:
    """What the runs of these groups say."""
    plain, drafted = _speed([group.plain for group in groups]), _speed([group.drafted for group in groups])
    differing = [found for group in groups for found in differences(group)]
    failed = [found for group in groups for found in failures(group)]
    prompts = sum(len(group.requests) for group in groups)
    runs = [run for group in groups for run in group.drafted]
    names = {name for run in runs for name in run.parts}
    parts = {name: sum(run.parts.get(name, 0.0) for run in runs) for name in sorted(names)}
    return GainRow(
        domain=domain,
        prompts=prompts,
        identical=prompts - len(differing) - len(failed),
        differing=differing,
        failed=failed,
        plain=plain,
        drafted=drafted,
        ratio=_over(drafted.decode, plain.decode),
        interval=bootstrap(groups, _ratio),
        end_to_end_ratio=_over(drafted.end_to_end, plain.end_to_end),
        noise=_noise(groups),
        tally=tally([each for run in runs for each in run.trajectories]),
        parts=parts,
        accounted=sum(parts.values()) / max(sum(run.wall for run in runs), 1e-9),
    )


def tally(trajectories: Sequence[Trajectory]) -> Tally:
    """What these trajectories counted."""
    block_size = max((each.blocks.candidates.shape[1] for each in trajectories), default=0) + 1
    sums = torch.stack([count(each, block_size) for each in trajectories]).sum(0)
    return Tally.from_vector(sums, block_size)


def _speed(samples: Sequence[Sequence[Run]]) -> Speed:
    """Tokens over the sum of each group's median seconds."""
    tokens = sum(runs[0].tokens for runs in samples)
    decoded = sum(runs[0].decoded for runs in samples)
    wall = sum(median([run.wall for run in runs]) for runs in samples)
    decoding = sum(median([run.decoding for run in runs]) for runs in samples)
    prefill = sum(median([run.parts.get("prefill", 0.0) for run in runs]) for runs in samples)
    return Speed(_over(decoded, decoding), _over(tokens, wall), prefill)


def _ratio(groups: Sequence[Group]) -> float | None:
    speeds = [_speed([getattr(group, side) for group in groups]).decode for side in ("drafted", "plain")]
    return _over(*speeds)


def _noise(groups: Sequence[Group]) -> float | None:
    """A plain run on either side of the drafted ones: what the machine itself changed."""
    first, last = (_speed([runs[i::2] for runs in (group.plain for group in groups)]).decode for i in (0, 1))
    ratio = _over(first, last)
    return abs(ratio - 1) if ratio else None


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top and bottom and bottom > 0 else None
