"""Proof A must catch an engine that is wrong: four faults of ENGINE section 2, each put in on purpose."""

from __future__ import annotations

from functools import cache

import pytest
from proof import Pair
from torch import Tensor

from adaflash.decoding import session
from adaflash.decoding.engine import Engine
from adaflash.decoding.lane import Lane
from adaflash.decoding.verify import Verdict, agree
from adaflash.targets import attention
from adaflash.types import Request

LONG = 20


@cache
def pair() -> Pair:
    return Pair("qwen3", count=5, length=LONG)


def differing(accuracy: float) -> int:
    """How many of the texts are not the oracle's."""
    its = pair()
    drafter = its.scripted(accuracy)
    drafter.strict = False
    results = Engine(its.target, drafter, lanes=3).generate([Request(p, LONG) for p in its.wanted])
    return sum(each.response.tolist() != text for each, text in zip(results, its.wanted.values(), strict=True))


@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_no_mutation_no_difference(accuracy: float) -> None:
    assert differing(accuracy) == 0


def test_one_future_token_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._visible
    monkeypatch.setattr(attention, "_visible", lambda query, length, window: right(query + 1, length, window))
    assert differing(0.6) > 0


def test_one_slot_rotated_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = pair().target.model.base_model.rotary_emb
    right = rotary.forward

    def wrong(x: Tensor, position_ids: Tensor, *rest: object, **named: object) -> object:
        follows = position_ids[:, 1:] == position_ids[:, :-1] + 1  # row i + 1 is not the first of its segment
        second = follows.clone()
        second[:, 1:] &= ~follows[:, :-1]
        shifted = position_ids.clone()
        shifted[:, 1:] += second
        return right(x, shifted, *rest, **named)

    monkeypatch.setattr(rotary, "forward", wrong)
    assert differing(0.6) > 0


def test_one_position_too_many_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool keeps one row of the rejected candidates."""
    right = session.Session._accept
    shifts: dict[int, int] = {}

    def wrong(self, lane, draft, verdict, features, first) -> list[int]:  # type: ignore[no-untyped-def]
        kept = right(self, lane, draft, verdict, features, first)
        if draft is not None and verdict.accepted < len(draft.window):
            shifts[id(lane)] = 1
        return kept

    monkeypatch.setattr(session.Session, "_accept", wrong)
    monkeypatch.setattr(session.Session, "_verify", _with_shift(session.Session._verify, shifts))
    assert differing(0.6) > 0


def _with_shift(verify, shifts: dict[int, int]):  # type: ignore[no-untyped-def]
    """Only what the target sees is displaced: the scripted drafter would refuse displaced anchors by itself."""

    def wrong(self, lanes, drafts):  # type: ignore[no-untyped-def]
        right = Lane.cached
        Lane.cached = property(lambda lane: len(lane.tokens) - 1 + shifts.get(id(lane), 0))
        try:
            return verify(self, lanes, drafts)
        finally:
            Lane.cached = right

    return wrong


def test_wrong_bonus_on_full_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(window: list[int], choices: list[int]) -> Verdict:
        verdict = agree(window, choices)
        whole = verdict.accepted == len(window) > 0
        return Verdict(verdict.accepted, choices[verdict.accepted - 1] if whole else verdict.token)

    monkeypatch.setattr(session, "agree", wrong)
    assert differing(1.0) > 0
