"""Memory of one vocabulary pass: allocated once, used by every chunk.

On a CPU a pass over a fresh large tensor costs 2-3 times one over memory that is there already, and a pass over what
lies in the core's own cache a third of one over memory: so elementwise work goes tile by tile, a few rows each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adaflash.losses.numerics import working

TILE = 1 << 18
"""Entries of a tile, per thread: 1 MiB of fp32; a closed form keeps three of them."""


class Workspace:
    """Buffers that grow to the largest chunk, then stay."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def teacher(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two buffers [rows, V] in the working precision of `like` [., V]."""
        dtype = working(like[:0]).dtype
        return self._take("log_q", rows, like, dtype), self._take("q", rows, like, dtype)

    def gradient(self, like: Tensor) -> Tensor:
        """A buffer of the shape and type of `like`."""
        return self._take("gradient", len(like), like, like.dtype)

    def tile(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three buffers of the shape of the tile `like`, in its working precision."""
        dtype = working(like[:0]).dtype
        first, second, third = (self._take(name, len(like), like, dtype) for name in ("a", "b", "c"))
        return first, second, third

    def tiles(self, logits: Tensor) -> Iterator[tuple[int, int]]:
        """Runs of rows of `logits` [M, V] that stay in the cache; all of them off the CPU."""
        rows = max(TILE * torch.get_num_threads() // logits.shape[1], 1) if logits.is_cpu else max(len(logits), 1)
        yield from ((start, min(start + rows, len(logits))) for start in range(0, len(logits), rows))

    def _take(self, name: str, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        held = self._held.get(name)
        if held is None or len(held) < rows or held.dtype != dtype or held.shape[1] != like.shape[1]:
            held = self._held[name] = torch.empty(rows, like.shape[1], dtype=dtype, device=like.device)
        return held[:rows]
