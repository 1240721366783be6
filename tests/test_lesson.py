"""What teaches a block: the target along the trajectory, or along what the drafter really drafted."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from proof import BLOCK, POLICIES, Pair

from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.fixed import FullBlock
from adaflash.lesson import Lesson
from adaflash.rollouts.base import Players
from adaflash.rollouts.buffer import RolloutBuffer
from adaflash.rollouts.live import LiveRollout
from adaflash.types import BlockLog, PromptBatch, Request, Trajectory


@pytest.fixture(scope="module")
def its() -> Pair:
    return Pair("qwen3", count=5, length=20)


@pytest.fixture(scope="module", params=["full", "random"])
def drafted(its: Pair, request) -> list[Trajectory]:
    engine = Engine(its.target, its.scripted(), POLICIES[request.param](), lanes=3, keep_states=True, keep_windows=True)
    return engine.generate([Request(prompt, 20) for prompt in its.wanted])


@torch.no_grad()
def said_along(its: Pair, each: Trajectory, block: int) -> torch.Tensor:
    """The target's states [L + 1, H] behind the trajectory and then the draft, by transformers' own forward."""
    log = each.blocks
    anchor, length = int(log.anchors[block]), int(log.lengths[block])
    read = torch.cat([each.tokens[: anchor + 1], log.candidates[block, :length]])
    return its.oracle(read[None], output_hidden_states=True).hidden_states[-1][0, anchor:]


def test_window_states_are_the_targets_behind_the_draft(its: Pair, drafted: list[Trajectory]) -> None:
    mistakes = 0
    for each in drafted:
        log = each.blocks
        assert log.states is not None
        parts = log.states.split((log.lengths + 1).tolist())
        for block, states in enumerate(parts):
            torch.testing.assert_close(states, said_along(its, each, block), atol=1e-3, rtol=1e-3)
        mistakes += int((log.lengths > log.accepted).sum())
    assert mistakes > 5  # or nothing was tried behind a mistake


def test_a_drafted_block_is_taught_along_its_draft_and_others_along_the_trajectory(
    its: Pair, drafted: list[Trajectory]
) -> None:
    anchors = [torch.arange(each.prompt_length, len(each.tokens) - 1) for each in drafted]
    lesson = Lesson.of(drafted, anchors, BLOCK, tiny.VOCAB - 1, torch.device("cpu"))
    plain = [dataclasses.replace(each, blocks=BlockLog.empty(BLOCK - 1)) for each in drafted]
    usual = Lesson.of(plain, anchors, BLOCK, tiny.VOCAB - 1, torch.device("cpu"))
    found = {"draft": 0, "trajectory": 0}
    for n, (row, anchor) in enumerate(zip(lesson.blocks.rows.tolist(), lesson.blocks.anchors.tolist(), strict=True)):
        log, count = drafted[row].blocks, int(usual.blocks.supervised[n].sum())
        taught = lesson.teacher[lesson.offsets[n] + anchor :]
        if anchor in log.anchors.tolist():
            block = log.anchors.tolist().index(anchor)
            expected = said_along(its, drafted[row], block)
            count, whole = min(count, len(expected)), count <= len(expected)
            assert bool(lesson.blocks.full[n]) == (bool(usual.blocks.full[n]) and whole)
            found["draft"] += 1
        else:
            expected = usual.teacher[usual.offsets[n] + anchor :]
            assert bool(lesson.blocks.full[n]) == bool(usual.blocks.full[n])
            found["trajectory"] += 1
        assert lesson.blocks.supervised[n].tolist() == [k < count for k in range(BLOCK - 1)]
        torch.testing.assert_close(taught[:count], expected[:count], atol=1e-3, rtol=1e-3)
    assert min(found.values()) > 10
    assert torch.equal(lesson.blocks.labels, usual.blocks.labels)


def test_live_rollouts_teach_along_drafts_on_request_and_only_once() -> None:
    target = tiny.target()
    players = Players(target, tiny.drafter(target, noise=0.05), FullBlock(), updates=0, seed=7)
    prompts = tuple(tiny.prompts(4))
    source = LiveRollout(max_new_tokens=12, teacher="draft")
    twice = PromptBatch(prompts, 0, 0, visits=4, rows=2, cursor=1)
    with pytest.raises(UserError, match=r"taught along the drafts can be trained on once.*set data\.reuse: 1"):
        RolloutBuffer().take(twice, source, players)
    once = dataclasses.replace(twice, visits=2)
    taken, _ = RolloutBuffer().take(once, source, players)
    for each in taken:
        assert each.blocks.states is not None
        assert len(each.blocks.states) == int((each.blocks.lengths + 1).sum())
    usual, _ = RolloutBuffer().take(once, LiveRollout(max_new_tokens=12), players)
    assert all(each.blocks.states is None for each in usual)


def test_window_states_survive_a_checkpoint() -> None:
    target = tiny.target()
    players = Players(target, tiny.drafter(target, noise=0.05), FullBlock(), updates=0, seed=7)
    source, buffer, resumed = LiveRollout(max_new_tokens=12, teacher="draft"), RolloutBuffer(), RolloutBuffer()
    batch = PromptBatch(tuple(tiny.prompts(4)), 0, 0, visits=2, rows=2, cursor=1)
    buffer.take(batch, source, players)
    resumed.load_state_dict(buffer.state_dict())
    second = dataclasses.replace(batch, visit=1)
    for one, other in zip(*(b.take(second, source, players)[0] for b in (buffer, resumed)), strict=True):
        assert torch.equal(one.blocks.states, other.blocks.states)
