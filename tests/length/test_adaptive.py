"""The paper's length head: its value by hand, its label, its decision, and that it never trains the drafter."""

from __future__ import annotations

import math

import pytest
import torch

from adaflash.blocks import build_blocks
from adaflash.errors import UserError
from adaflash.length.adaptive import AdaptiveLength, ThresholdHead
from adaflash.length.base import Outcome
from adaflash.types import BlockLog, Proposal, Trajectory

NONE = torch.zeros(0, 0, dtype=torch.bool)  # these policies do not look at single candidates


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_value_by_hand() -> None:
    """H = 1, two hidden units: f = [mean over all slots; last slot], one residual, sigmoid."""
    head = ThresholdHead(1, bottleneck=2)
    with torch.no_grad():
        head.down.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 0.25]]))
        head.down.bias.copy_(torch.tensor([0.1, -0.2]))
        head.res[0].weight.copy_(torch.tensor([[0.3, 0.7], [-1.0, 2.0]]))
        head.res[0].bias.copy_(torch.tensor([0.05, 0.0]))
        head.out.weight.copy_(torch.tensor([[1.5, -0.5]]))
        head.out.bias.copy_(torch.tensor([0.2]))
    mean, last = (4.0 + 1.0 + 1.0) / 3, 1.0  # slot 0, the anchor, is in the mean
    h = [silu(mean - 2 * last + 0.1), silu(0.5 * mean + 0.25 * last - 0.2)]
    h = [h[0] + silu(0.3 * h[0] + 0.7 * h[1] + 0.05), h[1] + silu(-h[0] + 2 * h[1])]
    expected = 1 / (1 + math.exp(-(1.5 * h[0] - 0.5 * h[1] + 0.2)))
    assert float(head(torch.tensor([[[4.0], [1.0], [1.0]]]))) == pytest.approx(expected, abs=1e-6)


def test_names_and_shapes_are_those_that_servers_load() -> None:
    policy = AdaptiveLength()
    policy.build(64, 8)
    assert {name: tuple(p.shape) for name, p in policy.named_parameters()} == {
        "head.down.weight": (256, 128), "head.down.bias": (256,),
        "head.res.0.weight": (256, 256), "head.res.0.bias": (256,),
        "head.out.weight": (1, 256), "head.out.bias": (1,),
    }  # fmt: skip


def saying(share: float, block_size: int = 8, **settings) -> AdaptiveLength:
    """A policy whose head says `share` of the block, whatever it sees."""
    policy = AdaptiveLength(**settings)
    policy.build(4, block_size)
    with torch.no_grad():
        policy.head.out.weight.zero_()
        policy.head.out.bias.fill_(math.log(share / (1 - share)))
    return policy


@pytest.mark.parametrize(("share", "settings", "length"), [
    # window = clamp(round(share * 8 * rate), minimum, 8), the anchor among them; length = window - 1
    (0.01, {}, 0),  # round(0.104) = 0, clamped to a window of 1: plain decoding
    (0.20, {}, 1),  # 2.08
    (0.25, {}, 2),  # 2.6
    (0.50, {}, 4),  # 5.2
    (0.76, {}, 7),  # 7.9
    (0.99, {}, 7),  # 10.3, clamped to the block
    (0.50, {"rate": 1.0}, 3),
    (0.50, {"rate": 2.0}, 7),
    (0.01, {"minimum": 3}, 2),
    (0.01, {"minimum": 8}, 7),
])  # fmt: skip
def test_decision(share: float, settings: dict, length: int) -> None:
    proposal = Proposal(torch.randn(3, 8, 4), torch.tensor([7, 7, 7]))
    assert saying(share, **settings).choose(proposal).tolist() == [length] * 3


def test_decision_never_exceeds_what_is_still_of_use() -> None:
    proposal = Proposal(torch.randn(3, 8, 4), torch.tensor([0, 2, 7]))
    assert saying(0.9).choose(proposal).tolist() == [0, 2, 7]


def test_block_of_sixteen() -> None:
    proposal = Proposal(torch.randn(1, 16, 4), torch.tensor([15]))
    assert saying(0.25, 16).choose(proposal).tolist() == [4]  # round(5.2) - 1


def test_label_and_loss_by_hand() -> None:
    """(sigma - (A + 1) / 8)^2, summed over labelled blocks."""
    policy = saying(0.5)
    accepted = torch.tensor([0.0, 3.0, 7.0, 2.5])
    loss = policy.loss(Outcome(torch.randn(4, 8, 4), accepted, torch.tensor([True, True, True, False]), NONE, NONE))
    assert float(loss) == pytest.approx((0.5 - 1 / 8) ** 2 + (0.5 - 4 / 8) ** 2 + (0.5 - 1) ** 2, abs=1e-6)
    none = policy.loss(Outcome(torch.randn(4, 8, 4), accepted, torch.zeros(4, dtype=torch.bool), NONE, NONE))
    assert float(none) == 0.0


def test_gradient_reaches_every_weight_of_the_head() -> None:
    policy = AdaptiveLength()
    policy.build(4, 8)
    policy.loss(
        Outcome(torch.randn(4, 8, 4), torch.arange(4.0), torch.ones(4, dtype=torch.bool), NONE, NONE)
    ).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.parameters())


@pytest.mark.parametrize(("finish", "labelled"), [
    ("length", [True, False, False]),  # fewer than K supervised candidates: cut off by the limit, unknown
    ("stop", [True, True, True]),  # a stop ends a block for good: known
])  # fmt: skip
def test_labels_near_the_end(finish: str, labelled: list[bool]) -> None:
    trajectory = Trajectory("t", "a", torch.arange(20), 4, finish, BlockLog.empty(7))
    blocks = build_blocks([trajectory], [torch.tensor([12, 13, 18])], 8, 99)
    assert blocks.full.tolist() == labelled
    policy = saying(0.5)
    loss = policy.loss(Outcome(torch.randn(3, 8, 4), torch.tensor([7.0, 6.0, 1.0]), blocks.full, NONE, NONE))
    errors = [(0.5 - (a + 1) / 8) ** 2 for a, counts in zip((7, 6, 1), labelled, strict=True) if counts]
    assert float(loss) == pytest.approx(sum(errors), abs=1e-6)


def test_build_makes_weights_once() -> None:
    policy = AdaptiveLength()
    policy.build(4, 8)
    head = policy.head
    policy.build(4, 8)
    assert policy.head is head


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"minimum": 0}])
def test_settings_out_of_range(wrong: dict) -> None:
    with pytest.raises(UserError, match="AdaptiveLength"):
        AdaptiveLength(**wrong)


def test_a_minimum_longer_than_the_block_is_refused() -> None:
    with pytest.raises(UserError, match="minimum 9 is longer than the block of 8"):
        AdaptiveLength(minimum=9).build(4, 8)
