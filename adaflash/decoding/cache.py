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
        self._at: tuple[Segments, Tensor, Tensor] | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, segments: Segments) -> None:
        """Store packed rows keys, values [M, heads, dim] at their lanes and positions."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(keys), self._allocate(values)
        rows, positions = self._places(segments, keys.device)
        self._keys[layer][rows, :, positions] = keys
        self._values[layer][rows, :, positions] = values

    def read(self, layer: int, lane: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions 0 .. length - 1 of one lane: two views [heads, length, dim]."""
        return self._keys[layer][lane, :, :length], self._values[layer][lane, :, :length]

    def read_all(self, layer: int, lanes: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions 0 .. length - 1 of lanes 0 .. lanes - 1: two views [lanes, heads, length, dim]."""
        return self._keys[layer][:lanes, :, :length], self._values[layer][:lanes, :, :length]

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

    def _places(self, segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
        """Lane and position of every row; all layers of a pass ask for the same segments."""
        if self._at is None or self._at[0] is not segments:
            self._at = segments, segments.rows.to(device), segments.positions.to(device)
        return self._at[1], self._at[2]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: the padded layout gives rows nobody has written a weight of zero, and 0 x NaN is NaN.
        return like.new_zeros(self.lanes, like.shape[1], self.capacity, like.shape[2])


def pool_bytes(lanes: int, capacity: int, layers: int, heads: int, dim: int, dtype: torch.dtype) -> int:
    """Memory of a pool as computed: keys and values, every layer."""
    return 2 * lanes * capacity * layers * heads * dim * dtype.itemsize
