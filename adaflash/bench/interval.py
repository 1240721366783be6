"""Bootstrap over clusters."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Interval = tuple[float, float]
Cluster = TypeVar("Cluster")
FEWEST = 3  # clusters; fewer say nothing of their spread


def bootstrap(
    clusters: Sequence[Cluster],
    statistic: Callable[[Sequence[Cluster]], float | None],
    draws: int = 1000,
    level: float = 0.95,
) -> Interval | None:
    """Percentile interval of a statistic when whole clusters are drawn again, with replacement; always the same seed.

    None for fewer than `FEWEST` clusters, or where the statistic is mostly undefined.
    """
    if len(clusters) < FEWEST:
        return None
    generator = random.Random(0)
    values = [statistic(generator.choices(clusters, k=len(clusters))) for _ in range(draws)]
    known = sorted(value for value in values if value is not None)
    if len(known) < draws / 2:
        return None
    tail = (1 - level) / 2
    return known[int(tail * (len(known) - 1))], known[round((1 - tail) * (len(known) - 1))]
