"""Decoding a group against the clock, token by token: latencies, and the speed while all lanes are busy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from adaflash.bench.runs import Run
from adaflash.decoding.engine import Engine
from adaflash.types import Request, Trajectory


@dataclass(frozen=True)
class News:
    """Tokens of one request, as they came."""

    at: float  # seconds since admission
    round: int  # passes of the target by then
    index: int
    tokens: int
    ends: bool


@dataclass(frozen=True)
class Streamed(Run):
    """A run that was watched: latencies are in the order of the requests."""

    first: tuple[float, ...] = ()  # seconds from admission to the first token
    latency: tuple[float, ...] = ()  # seconds from admission to the last
    window: tuple[int, float] = (0, 0.0)  # tokens and seconds while every lane was busy, prefill of the first left out


def play(engine: Engine, requests: Sequence[Request]) -> Streamed:
    """Decode all requests, admitted at once."""
    before, start = dict(engine.seconds), time.perf_counter()
    news: list[News] = []
    done: dict[int, Trajectory] = {}
    for each in engine.stream(requests):
        now, passes = time.perf_counter() - start, engine.passes["verify"]
        news.append(News(now, passes, each.index, len(each.tokens), each.done is not None))
        if each.done is not None:
            done[each.index] = each.done
    wall = time.perf_counter() - start
    parts = {name: value - before.get(name, 0.0) for name, value in engine.seconds.items()}
    order = range(len(requests))
    first, last = ({n.index: n.at for n in some} for some in (reversed(news), news))
    return Streamed(
        wall,
        parts,
        [done[i] for i in order],
        tuple(first[i] for i in order),
        tuple(last[i] for i in order),
        busy_window(news, min(engine.num_lanes, len(requests)), len(requests)),
    )


def busy_window(news: Sequence[News], lanes: int, count: int) -> tuple[int, float]:
    """Tokens and seconds from the moment the last lane got its first request to the round that left one empty for good."""
    started: set[int] = set()
    opened = closing = None
    for each in news:
        started.add(each.index)
        if opened is None and len(started) == lanes:
            opened = each
        if each.ends and len(started) == count:
            closing = each.round
            break
    if opened is None or closing is None or closing <= opened.round:
        return 0, 0.0
    inside = [each for each in news if opened.round < each.round <= closing]
    return sum(each.tokens for each in inside), inside[-1].at - opened.at
