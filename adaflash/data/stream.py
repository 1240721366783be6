"""The training stream: infinite, shuffled, mixed, sharded, and its position travels in the batch.

The unit is a rollout: `rollout_size` prompts per rank. Rollout r takes the samples [r * G, (r + 1) * G) of the global
order, G = rollout_size * world, rank i the i-th slice. It is yielded `visits` times in a row with the same prompts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from adaflash.data.order import Mixer
from adaflash.data.pool import PromptPool
from adaflash.types import Prompt, PromptBatch


class PromptStream(IterableDataset[PromptBatch]):
    """Yields PromptBatch without end. `start`, `rank` and `world` are set before each iteration."""

    def __init__(self, pools: Sequence[PromptPool], rollout_size: int, visits: int, seed: int, rows: int = 0) -> None:
        """Join the pools.

        Args:
            pools: one per source; their weights set the mix.
            rollout_size: prompts per rank and rollout.
            visits: how often each rollout is yielded.
            seed: of mixing and shuffling.
            rows: trajectories of a rollout that one visit trains on; 0: all.
        """
        self.rows = rows or rollout_size
        self.pools, self.rollout_size, self.visits = pools, rollout_size, visits
        self.mixer = Mixer([pool.source.weight for pool in pools], seed)
        self.start, self.rank, self.world = 0, 0, 1
        self._kept: tuple[int, tuple[Prompt, ...]] = (-1, ())

    def __iter__(self) -> Iterator[PromptBatch]:
        """Batches start, start + 1, ...; the loader takes turns among workers, so their number changes nothing."""
        worker = get_worker_info()
        at, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        batch = self.start + at
        while True:
            yield self.batch(batch)
            batch += stride

    def batch(self, number: int) -> PromptBatch:
        """Batch by its number, counted over visits."""
        rollout, visit = divmod(number, self.visits)
        return PromptBatch(self._prompts(rollout), rollout, visit, self.visits, self.rows, cursor=number + 1)

    def sample(self, number: int) -> Prompt:
        """Sample by its number in the global order."""
        source, k = self.mixer.locate(number)
        return self.pools[source].draw(k)

    def _prompts(self, rollout: int) -> tuple[Prompt, ...]:
        key = (rollout * self.world + self.rank) * self.rollout_size
        if self._kept[0] != key:  # later visits reuse the rendering
            self._kept = (key, tuple(self.sample(key + i) for i in range(self.rollout_size)))
        return self._kept[1]


class CursorLoader(DataLoader[PromptBatch]):
    """A loader that asks where to begin each time it is iterated, so that epochs and resumes begin at the cursor."""

    def __init__(self, stream: PromptStream, begin: Callable[[PromptStream], None], num_workers: int) -> None:
        """Wrap a stream.

        Args:
            stream: yields whole batches.
            begin: sets the stream's start, rank and world.
            num_workers: processes that render.
        """
        # an own generator: drawing the workers' base seed must not move the global one
        generator = torch.Generator().manual_seed(0)
        super().__init__(
            stream, batch_size=None, num_workers=num_workers, worker_init_fn=_leave_signals, generator=generator
        )
        self._begin, self._stream = begin, stream

    def __iter__(self):  # type: ignore[no-untyped-def]  # the base class names a private type
        """Begin at the cursor."""
        self._begin(self._stream)
        return super().__iter__()


def _leave_signals(_: int) -> None:
    """A signal for the whole process group must not kill workers before the main process has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
