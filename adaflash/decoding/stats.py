"""Acceptance by domain and position as one sum-state metric: reduced over ranks by adding, divided only in the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import pstdev

import torch
from torch import Tensor
from torchmetrics import Metric

from adaflash.decoding.tally import Tally, count, width
from adaflash.types import Trajectory

OVERALL = "all"  # the name of all domains together, in tables and CSV files
ENOUGH = 50  # blocks at risk from which a position counts in the position spread


class AcceptanceStats(Metric):
    """Sums of `Tally`, one row per domain.

    The state has a fixed size, [domains, width(block_size)] int64, so every rank takes part in the same collective
    whatever it has seen. Counts are integers: the result does not depend on batches, order or ranks.

    Args:
        block_size: anchor + K candidates of the drafter whose blocks are counted.
        domains: every domain that can occur, on all ranks alike. Empty: no split, any domain is counted.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, block_size: int, domains: Sequence[str] = ()) -> None:
        super().__init__()
        for name in domains:
            if name == OVERALL or not name or name.isdigit():
                raise ValueError(f"a domain cannot be called {name!r}: the log uses that name for something else")
        self.block_size = block_size
        self.domains = tuple(sorted(set(domains)))
        zeros = torch.zeros(max(len(self.domains), 1), width(block_size), dtype=torch.int64)
        self.add_state("counts", default=zeros, dist_reduce_fx="sum")

    def update(self, trajectories: Iterable[Trajectory]) -> None:
        """Count these trajectories (none is fine)."""
        for trajectory in trajectories:
            row = self._row(trajectory)
            self.counts[row] += count(trajectory, self.block_size).to(self.counts.device)

    def compute(self) -> Tensor:
        """The sums over all ranks, int64 [domains, width]; a collective where there are several ranks."""
        return self.counts.clone()

    def report(self) -> Report:
        """The numbers over all ranks; call it on every rank."""
        rows = self.compute().cpu()
        total = Tally.from_vector(rows.sum(0), self.block_size)
        split = {name: Tally.from_vector(row, self.block_size) for name, row in zip(self.domains, rows, strict=False)}
        return Report(total, split)

    def scalars(self, stage: str) -> dict[str, float]:
        """What goes into the log, see `Report.scalars`; call it on every rank."""
        return self.report().scalars(stage)

    def _row(self, trajectory: Trajectory) -> int:
        if not self.domains:
            return 0
        if trajectory.domain not in self.domains:
            known = ", ".join(self.domains)
            raise ValueError(f"request {trajectory.id!r} is of domain {trajectory.domain!r}; known domains: {known}")
        return self.domains.index(trajectory.domain)


class Report:
    """Tallies of one stage, reduced: overall and by domain."""

    def __init__(self, total: Tally, domains: dict[str, Tally]) -> None:
        self.total = total
        self.domains = domains

    def tallies(self) -> dict[str, Tally]:
        """By domain, and all of them together under the name `OVERALL`, last."""
        return {**self.domains, OVERALL: self.total}

    def spreads(self) -> dict[str, float]:
        """The paper's two variances, as standard deviations; left out where fewer than two values can be compared.

        Domain spread: population standard deviation (range: max - min) of tau, and of acceptance, over domains.
        Position spread: population standard deviation of conditional acceptance over positions with at least `ENOUGH`
        blocks at risk.
        """
        spreads: dict[str, float] = {}
        for name, suffix in (("tau", ""), ("acceptance", "/acceptance")):
            values = [numbers[name] for tally in self.domains.values() if name in (numbers := tally.numbers())]
            if len(values) > 1:
                spreads[f"domain_spread{suffix}"] = pstdev(values)
                spreads[f"domain_range{suffix}"] = max(values) - min(values)
        rates = [survived / at_risk for survived, at_risk in self.total.conditional() if at_risk >= ENOUGH]
        if len(rates) > 1:
            spreads["position_spread"] = pstdev(rates)
        return spreads

    def scalars(self, stage: str) -> dict[str, float]:
        """`{stage}/{number}` overall and `{stage}/{number}/{domain}` for the numbers that have no position of their own.

        A rate whose denominator is 0 is left out. The one exception is `{stage}/tau`, which is NaN when no round drafted:
        checkpoints are chosen by it, and a missing key would end a run that an undefined value does not.
        """
        overall = {"tau": math.nan} | self.total.numbers() | self.spreads()
        log = {f"{stage}/{name}": value for name, value in overall.items()}
        for domain, tally in self.domains.items():
            rates = tally.numbers().items()
            log |= {f"{stage}/{name}/{domain}": value for name, value in rates if not name[-1].isdigit()}
        return log
