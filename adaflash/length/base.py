"""What the engine and the module ask of a length policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adaflash.types import Proposal

if TYPE_CHECKING:
    from adaflash.drafters.base import Drafter
    from adaflash.targets.hf import HFTarget


@dataclass(frozen=True)
class Outcome:
    """What became of N blocks when they were laid beside the trajectory. A learned policy learns from this alone."""

    hidden: Tensor  # [N, B, H] block states, detached: nothing a policy learns reaches the drafter
    accepted: Tensor  # [N] acceptance of the whole block, a float: an expectation when sampled
    labelled: Tensor  # [N] bool: `accepted` is the whole truth (the block was not cut off by a length limit)
    agreed: Tensor  # [N, K] bool: candidate k is the trajectory's token
    known: Tensor  # [N, K] bool, a contiguous prefix: `agreed` can be told; behind it the block is censored
    head: Callable[[Tensor], Tensor] | None = (
        None  # the drafter's logits [M, n] from states [M, H], if rows are asked for
    )

    def sums(self) -> dict[str, Tensor]:
        """For the log, (numerator, denominator) by name: candidates at risk that agree, and acceptance of whole blocks.

        At risk are those behind an agreeing prefix: all of them are known even where slots are sampled.
        """
        before = torch.cat([torch.ones_like(self.agreed[:, :1]), self.agreed[:, :-1]], 1).cumprod(1).bool() & self.known
        return {
            "train/agreement": torch.stack([(self.agreed & before).sum(), before.sum()]),
            "train/accepted": torch.stack([(self.accepted * self.labelled).sum(), self.labelled.sum()]),
        }


@dataclass(frozen=True)
class Round:
    """One pass of the target after prefill, as it went. No clock: decisions must not depend on how busy a machine is."""

    load: int  # requests that took part
    drafted: int  # of these, requests with a draft; 0 is a plain step
    rows: int  # tokens the target read: anchors and candidates
    committed: int  # tokens kept, all requests together
    context: int  # mean number of tokens a request had in the cache


class LengthPolicy(nn.Module, ABC):
    """Chooses how many candidates of each request the target verifies. Learned policies own their weights."""

    needs_logits: bool = False  # True: all K vocabulary rows are computed before the choice

    def build(self, hidden_size: int, block_size: int) -> None:
        """Make the weights, if there are any, once the drafter's sizes are known; calling it again does nothing."""

    def prepare(self, target: HFTarget, drafter: Drafter) -> None:
        """An engine is about to use the policy with these two. Raises UserError where something needed is missing."""

    @abstractmethod
    def choose(self, proposal: Proposal) -> Tensor:
        """Lengths int64 [R]; the engine clamps them to `proposal.limits`."""

    def drafts(self, load: int) -> bool:
        """Whether to draft at all in the next round, which `load` requests take part in. False: a plain step."""
        return True

    def observe(self, done: Round) -> None:
        """What became of a round, drafted or plain."""

    def forecast(self, proposal: Proposal) -> Tensor | None:
        """What the policy expects, for those who measure it: [R, 1 + K], or None for a policy that expects nothing.

        First the acceptance of the whole block, then S_k, the chance that candidate k survives (NaN: it does not say).
        """
        return None

    def loss(self, outcome: Outcome) -> Tensor | None:
        """Sum of the policy's loss over the blocks it counts, or None for a policy that learns nothing."""
        return None

    def counted(self, outcome: Outcome) -> Tensor:
        """Blocks that `loss` sums over, bool [N]: what the module divides by."""
        return outcome.labelled

    def describe(self) -> str:
        """One phrase for the banner and the report."""
        return type(self).__name__
