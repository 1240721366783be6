"""A pool of keys and values in the shape transformers asks for. The only file that touches its cache classes."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from adaflash.types import KeyValues, Segments


class PoolCache(Cache):
    """The pool in the shape transformers asks for: one pass over packed rows `segments`."""

    def __init__(self, pool: KeyValues, segments: Segments, num_layers: int) -> None:
        super().__init__(layers=[_PoolLayer(pool, segments, layer) for layer in range(num_layers)])


class _PoolLayer(CacheLayerMixin):
    """Writes one layer's new rows; the packed attention function reads the pool itself."""

    is_compileable = False
    is_sliding = False

    def __init__(self, pool: KeyValues, segments: Segments, layer: int) -> None:
        super().__init__()
        self.pool, self.segments, self.layer = pool, segments, layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.pool.write(self.layer, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.segments)
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the pool allocates itself."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1
