"""What the engine asks of a length policy."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from adaflash.types import Proposal


class LengthPolicy(nn.Module, ABC):
    """Chooses how many candidates of each request the target verifies. Learned policies own their weights."""

    needs_logits: bool = False  # True: all K vocabulary rows are computed before the choice

    def build(self, hidden_size: int, block_size: int) -> None:
        """Make the weights, if there are any, once the drafter's sizes are known; calling it again does nothing."""

    @abstractmethod
    def choose(self, proposal: Proposal) -> Tensor:
        """Lengths int64 [R]; the engine clamps them to `proposal.limits`."""

    def loss(self, hidden: Tensor, accepted: Tensor, labelled: Tensor) -> Tensor | None:
        """Sum of the policy's loss over labelled blocks, or None for a policy that learns nothing.

        hidden [N, B, H] detached block states, accepted [N] acceptance of the full block (a float: an expectation when
        sampled), labelled [N] bool.
        """
        return None

    def describe(self) -> str:
        """One phrase for the banner and the report."""
        return type(self).__name__
