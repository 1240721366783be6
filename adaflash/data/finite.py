"""One pass over prompts for validation and prediction: finite, in a fixed order, equally long on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaflash.data.pool import PromptPool
from adaflash.data.report import RowError
from adaflash.types import Prompt

Place = tuple[int, int]  # pool, row


class PromptBatches:
    """Batches of up to `batch_size` prompts; ranks that run out give empty ones.

    Not a DataLoader on purpose: Lightning would shard a DataLoader a second time.
    """

    def __init__(
        self, pools: Sequence[PromptPool], places: Sequence[Place], batch_size: int, rank: int, world: int
    ) -> None:
        """Cut the places into batches.

        Args:
            pools: where the rows are.
            places: (pool, row) of every prompt of all ranks, in order.
            batch_size: prompts handed out at once.
            rank: this process.
            world: number of processes.
        """
        self.pools, self.batch_size = pools, batch_size
        self.places = list(places[rank::world])
        longest = -(-len(places) // world)
        self.count = -(-longest // batch_size)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Prompt, ...]]:
        for at in range(self.count):
            places = self.places[at * self.batch_size : (at + 1) * self.batch_size]
            yield tuple(prompt for place in places if (prompt := self._prompt(*place)) is not None)

    def _prompt(self, pool: int, row: int) -> Prompt | None:
        try:
            return self.pools[pool].prompt(row)
        except RowError as error:  # only in sources too large to be checked whole at setup
            self.pools[pool].note(row, error)
            return None


def in_order(pools: Sequence[PromptPool]) -> list[Place]:
    """Every row of every pool, as the data has them."""
    return [(number, row) for number, pool in enumerate(pools) for row in range(len(pool))]


def by_domain(pools: Sequence[PromptPool], per_domain: int | None) -> list[Place]:
    """The first rows of each domain, interleaved so that every batch has its share of each."""
    domains: dict[str, list[Place]] = {}
    for number, row in in_order(pools):
        places = domains.setdefault(pools[number].domain(row), [])
        if per_domain is None or len(places) < per_domain:
            places.append((number, row))
    spread = [
        ((at + 0.5) / len(places), order, place)
        for order, places in enumerate(domains.values())
        for at, place in enumerate(places)
    ]
    return [place for _, _, place in sorted(spread)]
