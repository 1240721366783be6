"""Policies without weights."""

from __future__ import annotations

import pytest
import tiny
import torch

from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy, Outcome
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.types import Proposal, Request

NONE = torch.zeros(0, 0, dtype=torch.bool)  # these policies do not look at single candidates

LIMITS = torch.tensor([0, 3, 7])
PROPOSAL = Proposal(torch.zeros(3, 8, 4), LIMITS)


@pytest.mark.parametrize(("policy", "lengths"), [
    (FullBlock(), [0, 3, 7]), (FixedLength(4), [0, 3, 4]), (FixedLength(0), [0, 0, 0]), (FixedLength(100), [0, 3, 7]),
])  # fmt: skip
def test_lengths(policy: LengthPolicy, lengths: list[int]) -> None:
    assert policy.choose(PROPOSAL).tolist() == lengths
    assert (
        policy.loss(Outcome(torch.zeros(3, 8, 4), torch.zeros(3), torch.ones(3, dtype=torch.bool), NONE, NONE)) is None
    )
    assert not [*policy.parameters()]


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(UserError, match="length is -1"):
        FixedLength(-1)


@pytest.mark.parametrize("length", [0, 2, 7])
def test_the_engine_plays_the_length_that_was_chosen(length: int) -> None:
    """Except in the last rounds, where fewer candidates can still be of use."""
    target = tiny.target()
    blocks = (
        Engine(target, tiny.drafter(target, noise=0.05), FixedLength(length))
        .generate([Request((3, 4, 5), 24)])[0]
        .blocks
    )
    left = 24 - 1 - torch.cat([torch.zeros(1, dtype=torch.int64), blocks.committed.cumsum(0)[:-1]])
    assert blocks.lengths.tolist() == (left - 1).clamp(max=length).tolist()


def test_the_engine_keeps_a_policy_within_bounds() -> None:
    class Wild(LengthPolicy):
        def choose(self, proposal):
            return torch.where(proposal.limits > 5, 1000, -3)

    target = tiny.target()
    result = Engine(target, tiny.drafter(target, noise=0.05), Wild()).generate([Request((3, 4, 5), 24)])[0]
    assert len(result.response) == 24
    assert set(result.blocks.lengths.tolist()) == {0, 6, 7}  # the limit above 5, else nothing: never 1000, never -3
