"""Requests that cannot be served, streams that are cut, and parts that fail: the others go on, the engine stays usable."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from proof import BLOCK, Pair
from torch import Tensor

from adaflash.decoding import session
from adaflash.decoding.cache import LanePool, pool_bytes
from adaflash.decoding.engine import Engine
from adaflash.length.base import LengthPolicy
from adaflash.targets.hf import HFTarget
from adaflash.types import Proposal, Request

LONG = 12


@cache
def pair() -> Pair:
    return Pair("llama", count=4, length=LONG)


def requests() -> list[Request]:
    return [Request(prompt, LONG, id=f"r{i}") for i, prompt in enumerate(pair().wanted)]


def engine(policy: LengthPolicy | None = None, lanes: int = 3) -> Engine:
    return Engine(pair().target, pair().scripted(), policy, lanes=lanes)


def assert_still_right(used: Engine) -> None:
    assert [each.response.tolist() for each in used.generate(requests())] == list(pair().wanted.values())


BAD = {
    "empty": (Request((), LONG), "empty"),
    "too long": (Request((1,) * 256, LONG), "context holds 256"),
    "no such token": (Request((1, tiny.VOCAB), LONG), "outside 0 .. 96"),
    "negative token": (Request((1, -1), LONG), "outside"),
    "negative length": (Request((1,), -1), "max_new_tokens is -1"),
    "temperature": (Request((1,), LONG, temperature=-0.5), "temperature is -0.5"),
    "nan": (Request((1,), LONG, temperature=float("nan")), "temperature is nan"),
    "top_p": (Request((1,), LONG, temperature=1.0, top_p=0.0), "top_p 0.0"),
    "stop strings": (Request((1,), LONG, stop=("x",)), "need a target with a tokenizer"),
    "seed": (Request((1,), LONG, seed=2**63), "64-bit"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_request_is_its_own_error(name: str) -> None:
    bad, says = BAD[name]
    used = engine()
    first, *good = used.generate([bad, *requests()])
    assert first.finish == "error" and says in first.error and len(first.response) == 0
    assert [each.response.tolist() for each in good] == list(pair().wanted.values())


def test_nothing_to_do() -> None:
    used = engine()
    assert used.generate([]) == []
    (none,) = used.generate([Request((1, 2), 0)])
    assert (none.finish, len(none.response), none.error) == ("length", 0, "")
    assert_still_right(used)


class Fails(LengthPolicy):
    """Fails for one request: the one whose limit is 3 (it has 4 tokens to go after the first)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def choose(self, proposal: Proposal) -> Tensor:
        if (proposal.limits == 3).any() and self.how == "raises":
            raise RuntimeError("no idea")
        return proposal.limits if self.how == "raises" else proposal.limits[:0]


def test_a_policy_that_fails_ends_that_request_only() -> None:
    used = engine(Fails("raises"))
    short = replace(requests()[0], max_new_tokens=5)
    failed, *good = used.generate([short, *requests()[1:]])
    assert failed.finish == "error" and "no idea" in failed.error and len(failed.response) == 1
    wanted = list(pair().wanted.values())[1:]
    assert all(
        each.response.tolist() == text or "no idea" in each.error for each, text in zip(good, wanted, strict=True)
    )
    wrong = engine(Fails("shape")).generate(requests())
    assert all("chose lengths (0,)" in each.error for each in wrong)


def test_a_sampler_that_fails_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    right, used = session.judge, engine()

    def judge(request: Request, *rest: Any) -> Any:
        if request.id == "bad" and rest[-1] > len(request.prompt) + 1:
            raise ValueError("bad luck")
        return right(request, *rest)

    monkeypatch.setattr(session, "judge", judge)
    bad = Request(next(iter(pair().wanted)), LONG, id="bad", temperature=1e-4)  # follows the greedy text
    *good, failed = used.generate([*requests(), bad])
    assert failed.finish == "error" and "ValueError: bad luck" in failed.error and len(failed.response) >= 1
    assert [each.response.tolist() for each in good] == list(pair().wanted.values())


def test_states_that_are_not_finite_are_an_error_not_a_token() -> None:
    its = Pair("llama", count=2, length=4)
    with torch.no_grad():
        its.target.model.get_input_embeddings().weight[90] = float("nan")
    poisoned, fine = Engine(its.target).generate([Request((90, 1), 4), Request(next(iter(its.wanted)), 4)])
    assert poisoned.finish == "error" and "not finite" in poisoned.error
    assert fine.response.tolist() == next(iter(its.wanted.values())) or 90 in fine.tokens


def test_a_drafter_that_fails_stops_the_stream_and_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    used = engine()
    with monkeypatch.context() as patch:
        patch.setattr(used.drafter, "draft", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            used.generate(requests())
    assert_still_right(used)


def test_cancel_while_running_while_waiting_and_before_the_start() -> None:
    used = engine(lanes=2)
    stream = used.stream(requests())
    used.cancel(0)
    done = {}
    for news in stream:
        if news.index == 1 and news.done is None:
            used.cancel(1)
            used.cancel(3)  # still waiting
        if news.done is not None:
            done[news.index] = news.done
    wanted = list(pair().wanted.values())
    assert [done[i].finish for i in range(4)] == ["cancelled", "cancelled", "length", "cancelled"]
    assert len(done[0].response) == 0 and len(done[3].response) == 0 and done[2].response.tolist() == wanted[2]
    part = done[1].response.tolist()
    assert 0 < len(part) <= LONG and part == wanted[1][: len(part)]
    assert_still_right(used)


def test_a_stream_left_alone_disturbs_nobody() -> None:
    used = engine()
    left, other = used.stream(requests()), used.stream(requests())
    next(left)
    next(other)
    assert_still_right(used)
    got: dict[int, list[int]] = {}
    for news in left:  # and it can be taken up again
        if news.done is not None:
            got[news.index] = news.done.response.tolist()
    assert [got[i] for i in sorted(got)] == list(pair().wanted.values())[: len(got)] and got


def test_a_closed_stream_gives_its_pools_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[LanePool]] = []

    def made(*args: int) -> LanePool:
        pool = LanePool(*args)
        pools.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(session, "LanePool", made)
    stream = engine().stream(requests())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert [pool() for pool in pools] == [None, None]


def test_requests_may_arrive_late() -> None:
    def arrivals() -> Iterator[Request | None]:
        for request in requests():
            yield from (None, request, None)

    results = {news.index: news.done for news in engine(lanes=2).stream(arrivals()) if news.done is not None}
    assert [results[i].response.tolist() for i in range(4)] == list(pair().wanted.values())  # type: ignore[union-attr]


def test_streamed_tokens_are_the_response() -> None:
    parts: dict[int, list[int]] = {}
    for news in engine().stream(requests()):
        parts.setdefault(news.index, []).extend(news.tokens)
    assert [parts[i] for i in range(4)] == list(pair().wanted.values())


def test_stop_strings(target_folder: Path) -> None:
    """The text ends with the token that completes the string, with and without a drafter."""
    target = HFTarget.load(str(target_folder))
    drafter = tiny.drafter(target, BLOCK, mask_id=290)
    prompt = tuple(b"Hello")
    (whole,) = Engine(target).generate([Request(prompt, 40, temperature=1.0)])
    ids = whole.response.tolist()
    pairs = (target.tokenizer.decode(ids[i : i + 2], skip_special_tokens=True) for i in range(9, 39))
    stop = next(pair for pair in pairs if pair.isascii() and len(pair) == 2)
    end = next(n for n in range(41) if stop in target.tokenizer.decode(ids[:n], skip_special_tokens=True))
    for used in (Engine(target), Engine(target, drafter)):
        (cut,) = used.generate([Request(prompt, 40, temperature=1.0, stop=("never in it", stop))])
        assert cut.finish == "stop" and cut.response.tolist() == ids[:end]


def test_queued_context_is_ingested_in_pieces() -> None:
    """A long prompt reaches the drafter in pieces of at most 256 rows, in order, each row once."""
    its = Pair("llama", count=1, length=LONG, max_position_embeddings=1024)
    prompt = tuple(i % 90 for i in range(600))
    its.wanted = {prompt: tiny.greedy(its.oracle, prompt, LONG)}
    drafter, sizes = its.scripted(), []
    right = drafter.ingest
    drafter.ingest = lambda context, *rest: (sizes.append(len(context)), right(context, *rest))[1]  # type: ignore[method-assign]
    (result,) = Engine(its.target, drafter).generate([Request(prompt, LONG)])
    assert result.response.tolist() == its.wanted[prompt]
    assert sizes[:3] == [256, 256, 88] and max(sizes) == 256


def test_pool_memory_is_as_computed() -> None:
    used = engine(lanes=3)
    used.generate(requests())
    capacity = max(len(p) for p in pair().wanted) + LONG + BLOCK
    assert used.memory["target_pool"] == pool_bytes(3, capacity, layers=4, heads=2, dim=16, dtype=torch.float32)


def test_a_pool_grows_without_losing_anything() -> None:
    from adaflash.types import Segments

    pool = LanePool(2, 4)
    keys = torch.randn(3, 2, 5)
    pool.write(0, keys, keys * 2, Segments((1,), (0,), (3,)))
    pool.reserve(90)
    got, values = pool.read(0, 1, 3)
    assert torch.equal(got, keys.transpose(0, 1)) and torch.equal(values, 2 * got) and pool.capacity >= 90
