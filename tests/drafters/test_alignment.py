"""K1: a block sees its context before the anchor and itself, nothing else; and training equals decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import tiny
import torch
from torch import Tensor

from adaflash.blocks import build_blocks, context_rows
from adaflash.decoding.cache import LanePool
from adaflash.decoding.engine import Engine
from adaflash.drafters.base import embed_blocks
from adaflash.drafters.dflash import DFlash
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.targets.hf import HFTarget
from adaflash.types import Blocks, Request, Segments, Trajectory

B, PROMPT, END = 8, 6, 40
OVERLAPPING = torch.tensor([10, 11, 12])
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


def tokens(count: int = END, seed: int = 0) -> list[int]:
    return torch.randint(tiny.VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def pair(request: pytest.FixtureRequest) -> tuple[HFTarget, DFlash]:
    target = tiny.target(dtype=request.param)
    return target, tiny.drafter(target, B, noise=0.05)


def train_states(
    target: HFTarget, drafter: DFlash, trajectories: Sequence[Trajectory], anchors: Sequence[Tensor]
) -> tuple[Blocks, Tensor]:
    """Blocks and their hidden states as the module's training step computes them."""
    blocks = build_blocks(trajectories, anchors, B, drafter.mask_id)
    segments = Segments.whole([context_rows(len(each.tokens)) for each in trajectories])
    context = torch.cat([each.context[:count] for each, count in zip(trajectories, segments.counts, strict=True)])
    return blocks, drafter(embed_blocks(target, blocks.tokens, target.dtype), blocks, context, segments)


@pytest.fixture
def logits(pair):
    """logits(changes to the trajectory, changes to the states) of blocks 10, 11, 12 of one trajectory, [3, B, V]."""
    target, drafter = pair
    base = tiny.trajectory(target, drafter, tokens(), PROMPT)

    @torch.no_grad()
    def of(context: Tensor | None = None, changed: dict[int, int] | None = None, embeds=lambda x: x) -> Tensor:
        ids = base.tokens.clone()
        for position, token in (changed or {}).items():
            ids[position] = token
        each = dataclasses.replace(base, tokens=ids, context=base.context if context is None else context)
        blocks = build_blocks([each], [OVERLAPPING], B, drafter.mask_id)
        inputs = embeds(embed_blocks(target, blocks.tokens, target.dtype).clone())
        segments = Segments.whole([context_rows(END)])
        return target.head(drafter(inputs, blocks, each.context[: context_rows(END)], segments))

    of.base = base  # type: ignore[attr-defined]
    return of


@pytest.mark.parametrize("block", [0, 1, 2])
def test_features_at_and_after_the_anchor_do_not_move_a_block_by_one_bit(logits, block: int) -> None:
    anchor = int(OVERLAPPING[block])
    before = logits()
    for row in (anchor, anchor + 1, END - 3):
        context = logits.base.context.clone()
        context[row:] += 3.0
        assert torch.equal(logits(context)[block], before[block]), row
    context = logits.base.context.clone()
    context[anchor - 1] += 3.0  # the last row it sees
    assert not torch.equal(logits(context)[block], before[block])
    context = logits.base.context.clone()
    context[0] += 3.0  # and the first
    assert not torch.equal(logits(context)[block], before[block])


def test_tokens_after_the_anchor_do_not_move_a_block_by_one_bit(logits) -> None:
    before = logits()
    after = logits(changed={position: (position * 7) % 90 for position in range(11, END)})
    assert torch.equal(after[0], before[0])  # block 10 reads token 10 alone
    assert not torch.equal(after[1], before[1])
    moved = logits(changed={10: 0})
    assert not torch.equal(moved[0], before[0])
    assert torch.equal(moved[1:], before[1:])


def test_no_block_reads_another_block(logits) -> None:
    before = logits()

    def shift(block: int):
        def change(embeds: Tensor) -> Tensor:
            embeds[block] += 1.0
            return embeds

        return change

    for block in range(3):
        after = logits(embeds=shift(block))
        assert not torch.equal(after[block], before[block])
        others = [other for other in range(3) if other != block]
        assert torch.equal(after[others], before[others])


def test_every_slot_reads_every_slot_of_its_own_block(logits) -> None:
    before = logits()
    for slot in range(B):

        def change(embeds: Tensor, slot: int = slot) -> Tensor:
            embeds[:, slot] += 1.0
            return embeds

        moved = (logits(embeds=change) != before).any(-1)
        assert moved.all(), slot  # bidirectional inside the block


def test_gradient_reaches_exactly_the_rows_before_the_anchor(pair) -> None:
    target, drafter = pair
    base = tiny.trajectory(target, drafter, tokens(), PROMPT)
    context = base.context[: context_rows(END)].clone().requires_grad_()
    blocks = build_blocks([base], [OVERLAPPING], B, drafter.mask_id)
    embeds = embed_blocks(target, blocks.tokens, target.dtype)
    hidden = drafter(embeds, blocks, context, Segments.whole([context_rows(END)]))
    target.head(hidden[0]).logsumexp(-1).sum().backward()
    assert (context.grad[10:] == 0).all()
    assert (context.grad[:10].abs().amax(1) > 0).all()


# ---- training equals decoding ----


class Listener(DFlash):
    """Keeps the states of every block it drafts, by request (requests enter the pool in their order)."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.heard: dict[int, list[tuple[int, Tensor]]] = {}
        self.pieces: dict[int, int] = {}
        self._who: dict[int, int] = {}

    def ingest(self, context, segments, pool) -> None:
        for lane, start in zip(segments.lanes, segments.starts, strict=True):
            if start == 0:
                self._who[lane] = len(self.heard)
                self.heard[self._who[lane]] = []
            self.pieces[self._who[lane]] = self.pieces.get(self._who[lane], 0) + 1
        super().ingest(context, segments, pool)

    def draft(self, embeds, anchors, lanes, pool):
        hidden = super().draft(embeds, anchors, lanes, pool)
        for row, lane in enumerate(lanes):
            self.heard[self._who[lane]].append((int(anchors[row]), hidden[row].clone()))
        return hidden


def listener(target: HFTarget) -> Listener:
    torch.manual_seed(1)
    made = Listener(num_layers=2, block_size=B, context_layers=[0, 2], mask_id=tiny.VOCAB - 1)
    made.build(target)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.to(target.dtype)


@pytest.mark.parametrize("policy", [FullBlock(), FixedLength(3)], ids=["full", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@torch.no_grad()
def test_slot_logits_in_training_equal_those_of_decoding(dtype: torch.dtype, policy) -> None:
    """After rejections, with incremental ingestion, in reused places: five requests through three lanes."""
    target = tiny.target(dtype=dtype)
    drafter = listener(target)
    requests = [Request(tuple(tokens(count, seed=count)), 20, str(count)) for count in (1, 5, 17, 30, 9)]
    decoded = Engine(target, drafter, policy, lanes=3, keep_states=True).generate(requests)
    assert sum(int((each.blocks.accepted < each.blocks.lengths).sum()) for each in decoded) > 20  # rejections
    assert min(drafter.pieces.values()) > 3  # context came piece by piece
    read = [tiny.trajectory(target, drafter, each.tokens.tolist(), each.prompt_length) for each in decoded]
    for trajectories in (decoded, read):  # states kept by the engine, and states of one read of the whole text
        blocks, hidden = train_states(target, drafter, trajectories, [each.blocks.anchors for each in decoded])
        heard = [block for index in range(len(requests)) for block in drafter.heard[index]]
        assert [anchor for anchor, _ in heard] == blocks.anchors.tolist()
        trained, served = target.head(hidden[:, 1:]), target.head(torch.stack([h for _, h in heard])[:, 1:])
        assert (trained - served).abs().max() <= CLOSE[dtype] * max(1.0, float(served.abs().max()))
        assert torch.equal(trained.argmax(-1), served.argmax(-1))


@torch.no_grad()
def test_ingestion_in_pieces_equals_ingestion_at_once(pair) -> None:
    target, drafter = pair
    base = tiny.trajectory(target, drafter, tokens(), PROMPT)
    anchors, embeds = torch.tensor([20]), embed_blocks(target, base.tokens[None, :B], target.dtype)
    drafted = []
    for pieces in ([20], [6, 1, 1, 8, 4], [1] * 20):
        pool, done = LanePool(2, 32), 0
        for count in pieces:
            drafter.ingest(base.context[done : done + count], Segments((1,), (done,), (count,)), pool)
            done += count
        drafted.append(drafter.draft(embeds, anchors, [1], pool))
    for other in drafted[1:]:
        torch.testing.assert_close(other, drafted[0], rtol=0, atol=CLOSE[target.dtype])


def test_alone_and_packed_give_the_same_states_and_gradients(pair) -> None:
    target, drafter = pair
    lengths = [(END, PROMPT), (25, 3), (33, 20)]
    every = [tiny.trajectory(target, drafter, tokens(end, seed=end), prompt) for end, prompt in lengths]
    anchors = [torch.tensor([10, 11, 12, 30]), torch.tensor([3, 23]), torch.tensor([20, 25, 31])]

    def run(order: list[int]) -> tuple[dict[int, Tensor], Tensor]:
        drafter.zero_grad()
        blocks, hidden = train_states(target, drafter, [every[i] for i in order], [anchors[i] for i in order])
        rows = {i: hidden[blocks.rows == row] for row, i in enumerate(order)}
        losses = (
            target.head(rows[0][:, 1:])
            .log_softmax(-1)
            .gather(-1, blocks.labels[blocks.rows == order.index(0)][..., None])
        )
        losses.mean().backward()
        return rows, drafter.fc.weight.grad.clone()

    (alone, gradient), (packed, same) = run([0]), run([1, 0, 2])
    close = CLOSE[target.dtype]
    torch.testing.assert_close(packed[0], alone[0], rtol=close, atol=close)
    torch.testing.assert_close(same, gradient, rtol=10 * close, atol=close * float(gradient.abs().max()))
    # and the read of the target itself does not depend on the pack
    solo = target.read(every[1].tokens, Segments.whole([25]), drafter.context_layers)
    both = target.read(torch.cat([every[0].tokens, every[1].tokens]), Segments.whole([END, 25]), drafter.context_layers)
    torch.testing.assert_close(
        both.context[END:], solo.context, rtol=close, atol=close * float(solo.context.abs().max())
    )
