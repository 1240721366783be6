"""Confidence: verify as long as the drafter itself believes in its candidates."""

from __future__ import annotations

from torch import Tensor

from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.types import Proposal


class Confidence(LengthPolicy):
    """Verify candidates while the product of the drafter's largest probabilities is at least `theta`.

    It looks at the candidates, so all K vocabulary rows are computed, and rejection sampling refuses it.

    Args:
        theta: Smallest product, in (0, 1].
    """

    needs_logits = True

    def __init__(self, theta: float = 0.3) -> None:
        super().__init__()
        if not 0 < theta <= 1:
            raise UserError(f"Confidence: theta is {theta}; allowed are numbers above 0, up to 1")
        self.theta = theta

    def choose(self, proposal: Proposal) -> Tensor:
        assert proposal.probability is not None
        return (proposal.probability.cumprod(-1) >= self.theta).sum(-1).minimum(proposal.limits)

    def describe(self) -> str:
        return f"Confidence(theta={self.theta})"
