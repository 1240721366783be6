"""Counts times cost table: what decoding would take on a machine that nothing disturbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from adaflash.length.base import LengthPolicy, Round
from adaflash.length.cost_aware import CostAware
from adaflash.length.cost_table import CostTable
from adaflash.types import Proposal, Trajectory

if TYPE_CHECKING:
    from adaflash.drafters.base import Drafter
    from adaflash.targets.hf import HFTarget


class Booked(LengthPolicy):
    """A policy, and beside it the modelled seconds of its rounds (prefill and host time are not in them).

    Args:
        policy: What chooses.
        costs: The table its rounds are booked with; a policy that knows cost decides by it as well.
    """

    def __init__(self, policy: LengthPolicy, costs: CostTable) -> None:
        super().__init__()
        self.policy, self.costs, self.seconds = policy, costs, 0.0
        self.needs_logits = policy.needs_logits

    def prepare(self, target: HFTarget, drafter: Drafter) -> None:
        """A policy that knows cost decides by the same table that its rounds are booked with."""
        if isinstance(self.policy, CostAware):
            self.policy.use(self.costs)
        else:
            self.policy.prepare(target, drafter)

    def choose(self, proposal: Proposal) -> Tensor:
        return self.policy.choose(proposal)

    def drafts(self, load: int) -> bool:
        return self.policy.drafts(load)

    def observe(self, done: Round) -> None:
        self.seconds += self.costs.seconds(done.rows, done.load, done.context)
        if done.drafted:
            self.seconds += self.costs.draft_seconds(done.drafted, done.context)
        self.policy.observe(done)

    def describe(self) -> str:
        return self.policy.describe()


def plain_seconds(costs: CostTable, texts: Sequence[Trajectory]) -> float:
    """Modelled seconds of plain decoding: all requests begin together, and each leaves when it has ended."""
    seconds = 0.0
    for step in range(1, max((len(text.response) for text in texts), default=0)):
        left = [text.prompt_length + step for text in texts if len(text.response) > step]
        seconds += costs.seconds(len(left), len(left), sum(left) // len(left))
    return seconds
