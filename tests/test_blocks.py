"""K1: what a block holds, by hand-written numbers, and that decoding lays its blocks out as training does."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from adaflash.blocks import (
    agreeing_prefix,
    anchor_range,
    block_tokens,
    build_blocks,
    choose_anchors,
    context_rows,
    slot_positions,
    teacher_positions,
)
from adaflash.decoding.engine import Engine
from adaflash.drafters.dflash import DFlash
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.types import BlockLog, Request, Trajectory

B, MASK = 8, 99


def counting(end: int, prompt: int, finish: str = "length", met: list[int] | None = None) -> Trajectory:
    """Tokens 100, 101, ... so that a token tells its position."""
    log = BlockLog.empty(B - 1)
    if met is not None:
        log = BlockLog(torch.tensor(met, dtype=torch.int64), *[torch.zeros(0)] * 4)
    return Trajectory("t", "a", torch.arange(100, 100 + end), prompt, finish, log)


def one_block(anchor: int, end: int = 32, prompt: int = 4, finish: str = "length"):
    return build_blocks([counting(end, prompt, finish)], [torch.tensor([anchor])], B, MASK)


def test_block_at_anchor_ten() -> None:
    blocks = one_block(10)
    assert blocks.anchors.tolist() == [10]
    assert blocks.tokens.tolist() == [[110, 99, 99, 99, 99, 99, 99, 99]]
    assert blocks.labels.tolist() == [[111, 112, 113, 114, 115, 116, 117]]  # candidates only: slot 0 has no label
    assert blocks.supervised.tolist() == [[True] * 7]
    assert slot_positions(blocks.anchors, B).tolist() == [[10, 11, 12, 13, 14, 15, 16, 17]]
    assert teacher_positions(blocks.anchors, B).tolist() == [[10, 11, 12, 13, 14, 15, 16]]


def test_first_and_last_anchor() -> None:
    prompt, end = 4, 32
    assert [*anchor_range(prompt, end)] == [*range(4, 31)]  # P .. E - 2
    first, last = one_block(4), one_block(30)
    assert first.tokens[0, 0] == 104
    assert first.labels.tolist() == [[105, 106, 107, 108, 109, 110, 111]]
    assert first.supervised.all()
    assert last.labels.tolist() == [[131, 0, 0, 0, 0, 0, 0]]  # its one candidate is token E - 1
    assert last.supervised.tolist() == [[True] + [False] * 6]


@pytest.mark.parametrize("anchor", [3, 31])
def test_the_last_prompt_token_and_the_last_token_are_no_anchors(anchor: int) -> None:
    with pytest.raises(AssertionError):
        one_block(anchor)


def test_supervision_is_a_contiguous_prefix_that_ends_with_the_response() -> None:
    blocks = build_blocks([counting(32, 4)], [torch.tensor([22, 24, 25, 28])], B, MASK)
    assert blocks.supervised.sum(1).tolist() == [7, 7, 6, 3]
    assert (blocks.supervised.long().cumprod(1).bool() == blocks.supervised).all()
    assert blocks.labels[3].tolist() == [129, 130, 131, 0, 0, 0, 0]


@pytest.mark.parametrize(("response", "anchors", "candidates"), [
    (1, [], []),
    (2, [4], [1]),
    (B - 1, [4, 5, 6, 7, 8, 9], [6, 5, 4, 3, 2, 1]),
    (B, [4, 5, 6, 7, 8, 9, 10], [7, 6, 5, 4, 3, 2, 1]),
    (B + 1, [4, 5, 6, 7, 8, 9, 10, 11], [7, 7, 6, 5, 4, 3, 2, 1]),
])  # fmt: skip
def test_short_responses(response: int, anchors: list[int], candidates: list[int]) -> None:
    trajectory = counting(4 + response, 4)
    chosen = choose_anchors(trajectory, 64, 0.5, torch.Generator().manual_seed(0))
    assert chosen.tolist() == anchors
    assert build_blocks([trajectory], [chosen], B, MASK).supervised.sum(1).tolist() == candidates


def test_rows_needed_of_the_target() -> None:
    # The last anchor, E - 2, sees rows 0 .. E - 3; its teacher row is E - 2.
    assert [context_rows(end) for end in (1, 2, 3, 32)] == [0, 0, 1, 30]
    assert teacher_positions(torch.tensor([30]), B)[0, 0] == 30


@pytest.mark.parametrize(("finish", "full"), [
    ("length", [True, True, False, False]),  # fewer than K supervised: left out of the length head's labels
    ("stop", [True, True, True, True]),  # a stop ends the block for good: its acceptance is known
    ("cancelled", [True, True, False, False]),
])  # fmt: skip
def test_blocks_whose_acceptance_can_be_labelled(finish: str, full: list[bool]) -> None:
    blocks = build_blocks([counting(32, 4, finish)], [torch.tensor([10, 24, 25, 30])], B, MASK)
    assert blocks.full.tolist() == full


def test_several_trajectories_keep_their_own_tokens() -> None:
    other = Trajectory("u", "b", torch.arange(500, 520), 6, "length", BlockLog.empty(7))
    blocks = build_blocks([counting(32, 4), other], [torch.tensor([4, 10]), torch.tensor([6])], B, MASK)
    assert blocks.rows.tolist() == [0, 0, 1]
    assert blocks.tokens[:, 0].tolist() == [104, 110, 506]
    assert blocks.labels[:, 0].tolist() == [105, 111, 507]


# ---- choosing anchors ----


def chosen(trajectory: Trajectory, count: int, mix: float, seed: int = 0) -> list[int]:
    return choose_anchors(trajectory, count, mix, torch.Generator().manual_seed(seed)).tolist()


def test_anchors_mix_met_starts_with_uniform_ones() -> None:
    met = [40, 44, 48, 52, 56, 60]
    trajectory = counting(1000, 4, met=met)
    picks = [chosen(trajectory, 8, 0.5, seed) for seed in range(50)]
    shares = [len(set(pick) & set(met)) for pick in picks]
    assert min(shares) >= 4
    assert sum(shares) / len(shares) < 4.5  # the uniform half rarely hits a met start among 996
    assert {anchor for pick in picks for anchor in pick} >= set(met)
    assert len(set(map(tuple, picks))) == 50


@pytest.mark.parametrize("seed", range(5))
def test_anchors_are_distinct_sorted_and_a_function_of_the_seed(seed: int) -> None:
    trajectory = counting(60, 4, met=[4, 9, 13, 13, 20, 58, 59, 3])  # 13 twice; 59 and 3 are no anchors
    pick = chosen(trajectory, 30, 0.5, seed)
    assert pick == sorted(set(pick))
    assert len(pick) == 30
    assert 4 <= pick[0] <= pick[-1] <= 58
    assert pick == chosen(trajectory, 30, 0.5, seed)


def test_each_pool_fills_up_for_the_other() -> None:
    assert len(chosen(counting(60, 4, met=[]), 10, 1.0)) == 10  # nothing met: all uniform
    assert len(chosen(counting(60, 4, met=[10, 11]), 10, 1.0)) == 10
    assert {10, 11} <= set(chosen(counting(60, 4, met=[10, 11]), 10, 1.0))
    everything = [*range(4, 59)]
    assert chosen(counting(60, 4, met=everything), 100, 0.5) == everything
    assert chosen(counting(60, 4, met=[10]), 100, 0.0) == everything


def test_the_first_anchor_is_in_the_pool() -> None:
    firsts = [chosen(counting(12, 4), 1, 0.5, seed)[0] for seed in range(200)]
    assert set(firsts) == {*range(4, 11)}  # P = 4 among them


def test_agreeing_prefix() -> None:
    candidates = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    allowed = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, True, False]])
    assert agreeing_prefix(candidates, torch.tensor([[1, 2, 3]] * 4), allowed).tolist() == [3, 1, 0, 2]


# ---- the layout of decoding ----


class Recorder(DFlash):
    """Notes what the engine hands to the drafter: input states, anchors, and how long the context is."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.seen: list[tuple[Tensor, int, int]] = []
        self.ingested: dict[int, int] = {}

    def ingest(self, context, segments, pool) -> None:
        for lane, start, count in zip(segments.lanes, segments.starts, segments.counts, strict=True):
            assert start in (0, self.ingested.get(lane))  # each row once, in order; a new request begins at 0
            self.ingested[lane] = start + count
        super().ingest(context, segments, pool)

    def draft(self, embeds, anchors, lanes, pool):
        for row, lane in enumerate(lanes):
            self.seen.append((embeds[row].clone(), int(anchors[row]), self.ingested[lane]))
        return super().draft(embeds, anchors, lanes, pool)


@pytest.mark.parametrize("policy", [FullBlock(), FixedLength(2)])
def test_decoding_lays_blocks_out_as_training(policy) -> None:
    target = tiny.target()
    made = Recorder(num_layers=1, block_size=B, context_layers=[0, 2], mask_id=tiny.VOCAB - 1)
    made.build(target)
    request = Request(tuple(range(5, 14)), 20)
    trajectory = Engine(target, made, policy, keep_states=True).generate([request])[0]
    anchors = trajectory.blocks.anchors
    assert anchors[0] == len(request.prompt)  # the token from prefill: the first block met when serving
    blocks = build_blocks([trajectory], [anchors], B, made.mask_id)
    assert len(made.seen) == len(anchors) > 3
    for (embeds, anchor, ingested), tokens, start in zip(made.seen, blocks.tokens, anchors.tolist(), strict=True):
        assert anchor == start == ingested  # context: exactly the positions strictly before the anchor
        assert torch.equal(embeds, target.embed(tokens))
    assert trajectory.context is not None
    assert len(trajectory.context) >= context_rows(len(trajectory.tokens))
    assert torch.equal(blocks.tokens, block_tokens(trajectory.tokens[anchors], B, made.mask_id))
