"""Keys and values of many requests in one pool: a place (lane) and a length each, never cropped.

Rolling back is not advancing: rows past a lane's length are not read, and are overwritten before anyone can see them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.types import Segments


class LanePool:
    """Keys and values [lanes, heads, capacity, dim] per layer, allocated when a layer is first written."""

    def __init__(self, lanes: int, capacity: int) -> None:
        self.lanes = lanes
        self.capacity = capacity
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, segments: Segments) -> None:
        """Store packed rows keys, values [M, heads, dim] at their lanes and positions."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(keys), self._allocate(values)
        pool_keys, pool_values = self._keys[layer], self._values[layer]
        for lane, start, count, row in zip(
            segments.lanes, segments.starts, segments.counts, segments.offsets, strict=False
        ):
            pool_keys[lane, :, start : start + count] = keys[row : row + count].transpose(0, 1)
            pool_values[lane, :, start : start + count] = values[row : row + count].transpose(0, 1)

    def read(self, layer: int, lane: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions 0 .. length - 1 of one lane: two views [heads, length, dim]."""
        return self._keys[layer][lane, :, :length], self._values[layer][lane, :, :length]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions a lane; what is stored is kept."""
        if capacity <= self.capacity:
            return
        grown = capacity - self.capacity
        for pool in (self._keys, self._values):
            for layer, old in pool.items():
                pool[layer] = torch.cat([old, old.new_zeros(*old.shape[:2], grown, old.shape[3])], dim=2)
        self.capacity = capacity

    def bytes(self) -> int:
        """Memory the pool holds, in bytes."""
        return sum(x.nbytes for pool in (self._keys, self._values) for x in pool.values())

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: an uninitialised NaN in an unread row would still be a trap for whoever reads it one day.
        return like.new_zeros(self.lanes, like.shape[1], self.capacity, like.shape[2])
