"""Random streams against cached texts of the oracle: always identical, no lane leaked.

ADAFLASH_FUZZ=2000 runs as many cases; ADAFLASH_FUZZ_SEED repeats one from its seed (a failure prints it).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from proof import BLOCK, POLICIES, Pair, Scripted, sampled

from adaflash.decoding import engine as engine_module
from adaflash.decoding.engine import Engine
from adaflash.decoding.session import Session
from adaflash.length.fixed import FullBlock
from adaflash.types import Request

LONG = 20
# Mixtures of experts have no fp64 kernels; they are in test_lossless.
FAMILIES = ("qwen3", "gemma3_text", "mistral")
CASES = int(os.environ.get("ADAFLASH_FUZZ", "40"))
FIRST = int(os.environ.get("ADAFLASH_FUZZ_SEED", "0"))


@dataclass(frozen=True)
class Known:
    """A request and the oracle's text for it; a shorter or stopped text is a piece of this one."""

    request: Request
    text: tuple[int, ...]


@cache
def world(family: str) -> tuple[Pair, list[Known]]:
    """Eight prompts of 1 .. 30 tokens, each greedy and sampled in two ways, far from any near tie (fp64)."""
    its = Pair(family, count=8, length=LONG, dtype=torch.float64)
    known = [Known(Request(p, LONG), tuple(r)) for p, r in its.wanted.items()]
    for number, prompt in enumerate(its.wanted):
        for how in ({"temperature": 0.8}, {"temperature": 1.2, "top_k": 6, "top_p": 0.9}):
            request = Request(prompt, LONG, seed=number, **how)  # type: ignore[arg-type]
            text, margin = sampled(its.oracle, request)
            if margin > 1e-9:
                known.append(Known(request, tuple(text)))
    return its, known


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Every session that is made."""
    made: list[Session] = []

    def record(*args: Any) -> Session:
        made.append(Session(*args))
        return made[-1]

    monkeypatch.setattr(engine_module, "Session", record)
    return made


def an_engine(rng: random.Random) -> tuple[Engine, list[Known]]:
    its, known = world(rng.choice(FAMILIES))
    drafter: Any = rng.choice([None, "real", "scripted", "scripted"])
    if drafter == "real":
        drafter = tiny.drafter(its.target, rng.choice([2, 5, 8]), noise=0.05)
    elif drafter == "scripted":
        drafter = Scripted(its.oracle, {k.request.prompt: list(k.text) for k in known}, rng.random())
        drafter.strict = False  # it knows one text a prompt; the others are drafted badly
    policy = POLICIES[rng.choice(list(POLICIES))]()
    if drafter and drafter.block_size != BLOCK and any(True for _ in policy.parameters()):
        policy = FullBlock()  # a head is made for one size of block
    return Engine(
        its.target, drafter, policy, lanes=rng.randint(1, 6),
        layout=rng.choice(["auto", "packed", "padded"]), all_candidates=rng.random() < 0.3,
        keep_states=rng.random() < 0.3,
    ), known  # fmt: skip


def a_request(rng: random.Random, known: list[Known]) -> tuple[Request, list[int] | None]:
    """A request and its whole text; None for one that cannot be served."""
    if rng.random() < 0.05:
        return rng.choice([Request((), 3), Request((1,) * 256, 3), Request((500,), 3)]), None
    one = rng.choice(known)
    stops = tuple(rng.choice(one.text) if rng.random() < 0.6 else rng.randrange(97) for _ in range(rng.randint(0, 2)))
    limit = rng.randint(0, LONG)
    text = list(one.text[:limit])
    end = next((i for i, token in enumerate(text) if token in stops), None)
    return replace(one.request, max_new_tokens=limit, stop_ids=stops), text if end is None else text[: end + 1]


def play(rng: random.Random, engine: Engine, known: list[Known], made: list[Session]) -> None:
    asked = [a_request(rng, known) for _ in range(rng.randint(1, 7))]
    late = rng.random() < 0.5

    def arrivals() -> Iterator[Request | None]:
        for request, _ in asked:
            yield from [None] * rng.randint(0, 2)
            yield request

    stream = engine.stream(arrivals() if late else [request for request, _ in asked])
    leave = rng.random() < 0.1
    results, cancelled, parts = {}, set(), {i: [] for i in range(len(asked))}
    for news in stream:
        parts[news.index] += news.tokens
        if news.done is not None:
            assert news.index not in results
            results[news.index] = news.done
        if rng.random() < 0.03:
            cancelled.add(index := rng.randrange(len(asked)))
            engine.cancel(index)
        if leave and rng.random() < 0.3:
            return stream.close()  # type: ignore[attr-defined, no-any-return]
    assert sorted(results) == list(range(len(asked)))
    for index, (_, text) in enumerate(asked):
        result = results[index]
        got = result.response.tolist()
        assert parts[index] == got
        if text is None:
            assert result.finish == "error" and not got
        elif result.finish == "cancelled":
            assert index in cancelled and got == text[: len(got)]
        else:
            assert got == text and not result.error, (index, got, text, result.error)
            assert sum(map(int, result.blocks.committed)) + result.plain_steps == max(len(got) - 1, 0)
    assert made[-1].active == [] and made[-1].free == list(range(made[-1].pool.lanes)), "a lane leaked"
    return None


@pytest.mark.parametrize("part", range(4))
def test_random_streams(part: int, sessions: list[Session]) -> None:
    for seed in range(FIRST + part, FIRST + CASES, 4):
        rng = random.Random(seed)
        engine, known = an_engine(rng)
        try:
            for _ in range(rng.randint(1, 2)):  # an engine is used again
                play(rng, engine, known, sessions)
        except BaseException:
            print(f"repeat with ADAFLASH_FUZZ_SEED={seed} ADAFLASH_FUZZ=1")
            raise
        sessions.clear()
