"""Keys and values of many requests in one pool: a place (lane) and a length each, never cropped.

Rolling back is not advancing: rows past a lane's length are not read, and are overwritten before anyone can see them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaflash.targets.grains import whole
from adaflash.types import Segments


class LanePool:
    """Keys and values [lanes, heads, capacity, dim] per layer, allocated when a layer is first written.

    There are as many positions as attention reads for `capacity`: it may read more than it needs.
    """

    def __init__(self, lanes: int, capacity: int) -> None:
        self.lanes = lanes
        self.capacity = capacity
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._at: tuple[Segments, tuple[Any, ...]] | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, segments: Segments) -> None:
        """Store packed rows keys, values [M, heads, dim] at their lanes and positions."""
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._allocate(keys), self._allocate(values)
        where = self._places(segments, keys.device)
        if len(segments.lanes) == 1:  # a slice is cheaper than indices: one request is decoded with 60 writes a token
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        self._keys[layer][where] = keys
        self._values[layer][where] = values

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
        for pool in (self._keys, self._values):
            for layer, old in pool.items():
                grown = whole(capacity, old.dtype, old.device) - old.shape[2]
                pool[layer] = torch.cat([old, old.new_zeros(*old.shape[:2], grown, old.shape[3])], dim=2)
        self.capacity = capacity

    def bytes(self) -> int:
        """Memory the pool holds, in bytes."""
        return sum(x.nbytes for pool in (self._keys, self._values) for x in pool.values())

    def _places(self, segments: Segments, device: torch.device) -> tuple[Any, ...]:
        """Index of lanes and positions of all rows; the layers of a pass all ask for the same segments."""
        if self._at is None or self._at[0] is not segments:
            every = slice(None)
            if len(segments.lanes) == 1:
                start = segments.starts[0]
                where: tuple[Any, ...] = (segments.lanes[0], every, slice(start, start + segments.counts[0]))
            else:
                where = (segments.rows.to(device), every, segments.positions.to(device))
            self._at = segments, where
        return self._at[1]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: the padded layout gives rows nobody has written a weight of zero, and 0 x NaN is NaN.
        positions = whole(self.capacity, like.dtype, like.device)
        return like.new_zeros(self.lanes, like.shape[1], positions, like.shape[2])


def pool_bytes(
    lanes: int, capacity: int, layers: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Memory of a pool as computed: keys and values, every layer."""
    return 2 * lanes * whole(capacity, dtype, torch.device(device)) * layers * heads * dim * dtype.itemsize
