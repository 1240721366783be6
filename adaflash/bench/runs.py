"""Decoding groups of prompts against the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Protocol

from adaflash.types import Prompt, Request, Trajectory

WARM_UP_TOKENS = 8


class DecodesRequests(Protocol):
    """What is measured: `adaflash.decoding.engine.Engine`."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time by part of the round, growing."""

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode all requests; results in their order."""


@dataclass(frozen=True)
class Run:
    """One decoding of one group."""

    wall: float
    parts: dict[str, float]  # seconds by part of the round
    trajectories: list[Trajectory]

    @cached_property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(len(each.response) for each in self.trajectories)

    @cached_property
    def decoded(self) -> int:
        """Response tokens but the first of each response, which comes from prefill."""
        return sum(max(len(each.response) - 1, 0) for each in self.trajectories)

    @property
    def decoding(self) -> float:
        """Seconds without prefill; all of them where the engine does not tell."""
        return self.wall - self.parts.get("prefill", 0.0)


@dataclass
class Group:
    """Prompts decoded together, and every run of them."""

    domain: str
    requests: list[Request]
    plain: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)


def groups_of(prompts: Mapping[str, Sequence[Prompt]], max_new_tokens: int, size: int) -> list[Group]:
    """Groups of one domain each, domains in turn, so that drift of the machine is shared by all of them."""
    requests = {
        name: [Request(each.tokens, max_new_tokens, each.id, name) for each in prompts[name]]
        for name in sorted(prompts)
    }
    split = [[Group(name, some[i : i + size]) for i in range(0, len(some), size)] for name, some in requests.items()]
    return [group for turn in zip_longest(*split) for group in turn if group is not None]


def shorter(request: Request) -> Request:
    """The same request for a warm-up."""
    return Request(request.prompt, min(request.max_new_tokens, WARM_UP_TOKENS), request.id, request.domain)


def decode(engine: DecodesRequests, requests: Sequence[Request]) -> Run:
    """Decode one group and look at the clock."""
    before = dict(engine.seconds)
    start = time.perf_counter()
    trajectories = engine.generate(requests)
    wall = time.perf_counter() - start
    parts = {name: value - before.get(name, 0.0) for name, value in engine.seconds.items()}
    return Run(wall, parts, trajectories)


Decode = Callable[[DecodesRequests, Sequence[Request]], Run]


def take_turns(
    group: Group, plain: DecodesRequests, drafted: DecodesRequests, rounds: int = 1, decode: Decode = decode
) -> None:
    """Plain, drafted, drafted, plain: a machine that gets slower or faster does so for both."""
    for _ in range(rounds):
        group.plain.append(decode(plain, group.requests))
        group.drafted.append(decode(drafted, group.requests))
        group.drafted.append(decode(drafted, group.requests))
        group.plain.append(decode(plain, group.requests))


def differences(group: Group) -> list[dict[str, object]]:
    """The prompts whose tokens were not the same in every run, with the first position that differs from plain."""
    found: list[dict[str, object]] = []
    reference, *others = group.plain + group.drafted
    for i, request in enumerate(group.requests):
        text = reference.trajectories[i].response.tolist()
        rivals = [run.trajectories[i].response.tolist() for run in others]
        places = [_first_difference(text, rival) for rival in rivals if rival != text]
        if places:
            found.append({"id": request.id, "domain": request.domain, "position": min(places), "runs": len(places)})
    return found


def failures(group: Group) -> list[dict[str, object]]:
    """The prompts that could not be served; they count neither as identical nor as different."""
    return [
        {"id": each.id, "domain": each.domain, "error": each.error}
        for each in group.plain[0].trajectories
        if each.finish == "error"
    ]


def _first_difference(text: list[int], rival: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(text, rival, strict=False)) if a != b), min(len(text), len(rival)))
