"""Plain steps in between: the text is the target's own, context rows queue, and are handed over in small portions."""

from __future__ import annotations

import pytest
from proof import Pair, assert_same

from adaflash.decoding.engine import Engine
from adaflash.length.base import Round
from adaflash.length.fixed import FullBlock
from adaflash.types import Request

LONG = 60


class Late(FullBlock):
    """Plain steps at first, and notes of every round."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin, self.rounds = begin, list[Round]()
        self.asked: list[int] = []

    def drafts(self, load: int) -> bool:
        self.asked.append(load)
        return len(self.rounds) >= self.begin

    def observe(self, done: Round) -> None:
        self.rounds.append(done)


def test_queued_rows_are_ingested_at_most_256_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    its = Pair("qwen3", count=9, length=LONG)
    drafter, policy = its.scripted(), Late(LONG - 20)
    handed: list[int] = []
    ingest = drafter.ingest
    monkeypatch.setattr(drafter, "ingest", lambda rows, *rest: (handed.append(len(rows)), ingest(rows, *rest)))
    results = assert_same(Engine(its.target, drafter, policy, lanes=9), its.oracle, its.wanted, Request((), LONG))
    assert all(each.plain_steps >= LONG - 20 for each in results)
    assert max(handed) <= 256 < handed[0] + handed[1]
    assert sum(int(each.blocks.accepted.sum()) for each in results) > 20  # and then the drafter knows everything


def test_a_policy_that_never_drafts_costs_no_draft() -> None:
    its = Pair("llama", count=3, length=20)
    drafter = its.scripted()
    drafter.draft = drafter.ingest = None  # type: ignore[assignment]  # would raise
    results = assert_same(Engine(its.target, drafter, Late(10**9)), its.oracle, its.wanted, Request((), 20))
    assert all(each.plain_steps == 19 and not len(each.blocks.anchors) for each in results)


def test_rounds_are_told_as_they_were() -> None:
    its = Pair("llama", count=3, length=20)
    policy = Late(4)
    results = assert_same(Engine(its.target, its.scripted(), policy, lanes=3), its.oracle, its.wanted, Request((), 20))
    assert policy.asked[:4] == [3] * 4
    plain, drafted = [r for r in policy.rounds if not r.drafted], [r for r in policy.rounds if r.drafted]
    assert [(r.load, r.rows, r.committed) for r in plain[:4]] == [(3, 3, 3)] * 4
    assert sum(r.committed for r in policy.rounds) == 3 * 19
    assert sum(r.drafted for r in drafted) == sum(len(each.blocks.anchors) for each in results)
    sent = sum(int(each.blocks.lengths.sum()) for each in results)
    assert sum(r.rows - r.load for r in policy.rounds) == sent
    prompts = [len(p) for p in its.wanted]
    assert policy.rounds[0].context == sum(prompts) // 3  # the anchor is in no cache
