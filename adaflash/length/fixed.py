"""Policies without weights: the whole block, or a fixed number of candidates."""

from __future__ import annotations

from torch import Tensor

from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.types import Proposal


class FullBlock(LengthPolicy):
    """Verify every candidate: fixed-block DFlash."""

    def choose(self, proposal: Proposal) -> Tensor:
        return proposal.limits


class FixedLength(LengthPolicy):
    """Verify the first `length` candidates.

    Args:
        length: Candidates a round; longer than the block means the whole block.
    """

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        if length < 0:
            raise UserError(f"FixedLength: length is {length}; allowed are 0 (plain decoding with a draft) and more")
        self.length = length

    def choose(self, proposal: Proposal) -> Tensor:
        return proposal.limits.clamp(max=self.length)

    def describe(self) -> str:
        return f"FixedLength({self.length})"
