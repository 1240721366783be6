"""Memory and threads of one vocabulary pass.

On a CPU a pass over a fresh large tensor costs 2-3 times one over memory that is there already, and a pass over what
lies in the core's own cache a third of one over memory: so buffers are allocated once, and elementwise work goes tile
by tile, a few rows each. Each thread takes whole tiles: were every small operation split over the threads, each would
wait for the slowest, thousands of times an update (ten times slower on a machine that has other work as well).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from adaflash.losses.numerics import working

TILE = 1 << 18
"""Entries of a tile: 1 MiB of fp32; a closed form keeps three of them."""

Buffers = tuple[Tensor, Tensor, Tensor]
Result = TypeVar("Result")


class Workspace:
    """Buffers that grow to the largest chunk, then stay."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def teacher(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two buffers [rows, V] in the working precision of `like` [., V]."""
        return self._take("log_q", rows, like), self._take("q", rows, like)

    def gradient(self, like: Tensor) -> Tensor:
        """A buffer of the shape and type of `like`."""
        return self._take("gradient", len(like), like, like.dtype)

    def tile(self, worker: int, like: Tensor, use: str = "") -> Buffers:
        """A worker's three buffers of the shape of the tile `like`, in its working precision."""
        first, second, third = (self._take(f"{use}{name}{worker}", len(like), like) for name in "abc")
        return first, second, third

    def map(self, work: Callable[[int, slice], Result], logits: Tensor) -> list[Result]:
        """work(worker, rows) for every tile of `logits` [M, V], in order; on a CPU by as many workers as threads.

        Off the CPU one tile is everything. Workers compute without gradients.
        """
        step = self.tile_rows(logits) if logits.is_cpu else max(len(logits), 1)
        tiles = [slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step)]
        threads = torch.get_num_threads()
        if not logits.is_cpu or min(threads, len(tiles)) < 2:
            return [work(0, tile) for tile in tiles]
        try:
            return _share(work, tiles, min(threads, len(tiles)))
        finally:
            torch.set_num_threads(threads)

    def bytes(self) -> int:
        """Memory that the buffers hold, in bytes."""
        return sum(buffer.nbytes for buffer in self._held.values())

    def tile_rows(self, logits: Tensor) -> int:
        """Rows of a tile on a CPU."""
        return max(TILE // logits.shape[1], 1)

    def _take(self, name: str, rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or working(like[:0]).dtype
        held = self._held.get(name)
        if held is None or len(held) < rows or held.dtype != dtype or held.shape[1] != like.shape[1]:
            held = self._held[name] = torch.empty(rows, like.shape[1], dtype=dtype, device=like.device)
        return held[:rows]


def _share(work: Callable[[int, slice], Result], tiles: list[slice], workers: int) -> list[Result]:
    """Each worker takes the next tile that is left, so that a slow core holds nobody up."""
    left, found = iter(list(enumerate(tiles))), dict[int, Result]()

    @torch.no_grad()
    def take(worker: int) -> None:
        torch.set_num_threads(1)  # of this thread; but new threads of the process would inherit it, until `map` ends
        for index, tile in left:
            found[index] = work(worker, tile)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(take, worker) for worker in range(workers)]:
            future.result()
    return [found[index] for index in range(len(tiles))]
