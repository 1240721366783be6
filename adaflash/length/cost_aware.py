"""The length that pays: survival against what verification costs on this machine, and no draft where none pays."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adaflash.errors import UserError
from adaflash.length.base import Round
from adaflash.length.cost_table import CostTable, find
from adaflash.length.ledger import Ledger
from adaflash.length.scan import best_lengths
from adaflash.length.survival import LearnsSurvival
from adaflash.types import Proposal

if TYPE_CHECKING:
    from adaflash.drafters.base import Drafter
    from adaflash.targets.hf import HFTarget

FLAT = 1.05  # below the knee: a full block costs at most so much of a plain step


class CostAware(LearnsSurvival):
    """Maximises long-run tokens per second, in the seconds of the cost table (`adaflash cost`), never of the clock.

    A round of R requests commits R + G(m) tokens in D + T(R + m) seconds when it verifies the m likeliest candidates.
    With lambda = committed / seconds so far, m* = argmax_m G(m) - lambda T(R + m) (ENGINE section 4). Where widths are
    free the whole block is sent, without looking. With the fall-back, loads at which drafted rounds realised less than
    plain steps are decoded plainly, but for probes.

    Args:
        fall_back: Decode plainly where drafting does not pay.
        vocab_features: See `LearnsSurvival`.
        table: A cost table of your own; by default the one that `adaflash cost` keeps for this machine and these models.
        probe_every: While drafting is off, one round in so many is drafted all the same.
        hysteresis: The gain over plain decoding at which drafting is taken up again.
    """

    def __init__(
        self,
        fall_back: bool = True,
        vocab_features: bool = False,
        table: str = "",
        probe_every: int = 64,
        hysteresis: float = 1.05,
    ) -> None:
        super().__init__(vocab_features)
        if probe_every < 2 or hysteresis < 1:
            raise UserError("CostAware: allowed are probe_every >= 2 and hysteresis >= 1")
        self.fall_back, self.table = fall_back, table
        self.probe_every, self.hysteresis = probe_every, hysteresis
        self._ledger = Ledger(probe_every, hysteresis)
        self._costs: CostTable | None = None
        self._learnt_with = 0  # digest of the table behind the ledger's seconds; 0: the ledger is empty
        self._told = ""

    @property
    def costs(self) -> CostTable:
        """The cost table; an engine reads it."""
        assert self._costs is not None, "a policy that knows cost is prepared by its engine"
        return self._costs

    @property
    def ledger(self) -> Ledger:
        """The books so far."""
        return self._ledger

    def prepare(self, target: HFTarget, drafter: Drafter) -> None:
        """Read the table anew. Raises UserError where there is none; warns, once, of a stale one."""
        table, stale = find(target, drafter, self.table)
        if stale and stale != self._told:
            self._told = stale
            warnings.warn(stale, stacklevel=2)
        self.use(table)

    def use(self, table: CostTable) -> None:
        """Decide by this table. Books that were kept in other seconds are closed."""
        if self._learnt_with not in (0, table.digest):
            warnings.warn(
                "CostAware: another cost table than before; what was learnt of gains starts anew",
                stacklevel=2,
            )
            self._ledger = Ledger(self.probe_every, self.hysteresis)
            self._learnt_with = 0
        if self._costs is None or self._costs.digest != table.digest:
            self._costs = table

    def choose(self, proposal: Proposal) -> Tensor:
        load, context = len(proposal.limits), self._context(proposal)
        cost = self.costs.curve(load, context)
        if float(cost[-1]) <= FLAT * float(cost[0]):
            return proposal.limits
        price = self._ledger.price(load, float(cost[0]))
        return best_lengths(self.survival(proposal), proposal.limits, cost, price)

    def drafts(self, load: int) -> bool:
        return not self.fall_back or self._ledger.wants_draft(load)

    def observe(self, done: Round) -> None:
        if not done.drafted:
            self._ledger.stepped(done.load)
            return
        seconds = self.costs.draft_seconds(done.drafted, done.context)
        seconds += self.costs.seconds(done.rows, done.load, done.context)
        plain = done.load / self.costs.seconds(done.load, done.load, done.context)
        self._ledger.drafted(done.load, done.committed, seconds, seconds * plain)
        self._learnt_with = self.costs.digest

    def get_extra_state(self) -> Tensor:
        """Lambda, gains and fall-back by load, and which table their seconds came from: float64 [8, BUCKETS]."""
        mark = torch.zeros(1, self._ledger.off.numel(), dtype=torch.float64)
        mark[0, 0] = self._learnt_with  # 48 bits: exact in float64
        return torch.cat([self._ledger.state(), mark])

    def set_extra_state(self, state: Tensor) -> None:
        """The inverse of `get_extra_state`."""
        self._ledger.restore(state)
        self._learnt_with = int(state[-1, 0])

    def describe(self) -> str:
        features = ", vocab_features" if self.vocab_features else ""
        return f"CostAware(fall_back={self.fall_back}{features})"

    def _context(self, proposal: Proposal) -> int:
        """Mean number of tokens in the cache; without one, the table's smallest."""
        if proposal.anchors is None:
            return self.costs.contexts[0]
        return int(proposal.anchors.double().mean())
