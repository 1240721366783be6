"""Attention over packed rows: every segment attends to its own lane, causally, whatever the others do.

Registered with transformers under the name `packed_lanes`; the segments and the pool of a pass travel as keyword
arguments of the model's forward. Linear layers then cost exactly the rows sent, so a shorter length pays. Attention
itself has two layouts: `packed`, one call a segment on that lane's own rows, and `padded`, one call for all lanes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adaflash.targets.grains import whole
from adaflash.types import KeyValues, Segments

NAME = "packed_lanes"  # a name with "flash" in it is taken for a flash-attention kernel
Layout = Literal["auto", "packed", "padded"]
# Padding costs its share of scores, a call of its own costs about this many scores (2 cores, 9 heads of 64, fp32: one
# call took 25 us, a hundred scores a head 9 us).
CALL = 256
# In bfloat16 a CPU's result for a row depends on how many keys there are (see `adaflash.targets.grains`), and on whether
# it is one of very few rows (one with AMX, up to three with AVX512_BF16: other kernels, other order of sums). Keys read
# in whole grains and four rows at least make it depend on the row alone, in both layouts; `adaflash.linear` does the same
# for the products.
COMPANY = 4


class PackedPass:
    """One forward over packed rows: where they stand, where their past is, and what all layers share."""

    def __init__(
        self,
        segments: Segments,
        pool: KeyValues | None,
        device: torch.device,
        layout: Layout = "auto",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.segments = segments
        self.device = device
        self.pool = pool
        self.dtype = dtype
        self.independent = pool is not None and dtype is torch.bfloat16 and device.type == "cpu"
        self.padded = pool is not None and (layout == "padded" or (layout == "auto" and _padding_pays(segments)))
        self._cache: dict[tuple[int | str, ...], Tensor] = {}

    def whole(self, length: int) -> int:
        """Keys of the pool to read for `length`, so that a row's result is its own."""
        return length if self.pool is None else whole(length, self.dtype, self.device)

    def seen(self, start: int, count: int, window: int) -> Tensor:
        """Which positions of a lane each of its `count` new rows sees, bool [count, whole(start + count)]."""
        query = torch.arange(start, start + count, device=self.device)
        return _visible(query, self.whole(start + count), window)

    def mask(self, start: int, count: int, window: int, groups: int, like: Tensor) -> Tensor:
        """`seen` as an additive mask, repeated for the query heads of a group: [groups * count, positions]."""
        key = (start, count, window, groups)
        if key not in self._cache:
            self._cache[key] = _additive(self.seen(start, count, window), like).repeat(groups, 1)
        return self._cache[key]

    def lane_mask(self, window: int, groups: int, like: Tensor) -> Tensor:
        """Additive mask of the padded layout, [lanes, 1, groups * width, longest].

        Slots without a row see position 0: a row that sees nothing would be NaN.
        """
        key = ("lanes", window, groups)
        if key not in self._cache:
            places = torch.zeros(*self.shape, dtype=torch.int64, device=self.device)
            places[self.slots] = self.segments.positions.to(self.device)
            seen = _visible(places.flatten(), self.longest, window).unflatten(0, self.shape)
            self._cache[key] = _additive(seen, like).repeat(1, groups, 1)[:, None]
        return self._cache[key]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Lanes and width of the padded layout; lanes that do not take part are computed too."""
        return max(self.segments.lanes) + 1, max(self.segments.counts)

    @cached_property
    def longest(self) -> int:
        """Positions that the longest lane holds after this pass, in whole grains."""
        ends = (start + count for start, count in zip(self.segments.starts, self.segments.counts, strict=True))
        return self.whole(max(ends))

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Lane and slot of every packed row in the padded layout."""
        return self.segments.rows.to(self.device), self.segments.slots.to(self.device)


def _padding_pays(segments: Segments) -> bool:
    """Whether one padded call is cheaper than a call for each segment."""
    if len(segments.lanes) < 2 or min(segments.starts) == 0:  # whole prompts: the causal kernel skips half of the work
        return False
    ends = [start + count for start, count in zip(segments.starts, segments.counts, strict=True)]
    alone = sum(count * end for count, end in zip(segments.counts, ends, strict=True)) + CALL * len(ends)
    return (max(segments.lanes) + 1) * max(segments.counts) * max(ends) <= alone


def _visible(query: Tensor, length: int, window: int) -> Tensor:
    """Positions < length that rows at positions `query` [n] see, bool [n, length]; window 0 is no window."""
    past = torch.arange(length, device=query.device)
    seen = past <= query[:, None]
    return seen & (past > query[:, None] - window) if window else seen


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedPass | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of query [1, heads, M, dim] over the lanes of the pass; returns [1, M, heads, dim].

    Without a pool every segment starts at position 0 and reads its own rows of key, value [1, kv_heads, M, dim].
    """
    assert packed is not None, "the packed target must be read through HFTarget.read"
    window = sliding_window or 0
    if packed.padded and s_aux is None:
        return _padded(module, query, packed, window, scaling, key.shape[1])[None], None
    segments, outputs = packed.segments, []
    for lane, start, count, row in zip(
        segments.lanes, segments.starts, segments.counts, segments.offsets, strict=False
    ):
        if packed.pool is None:
            keys, values = key[0, :, row : row + count], value[0, :, row : row + count]
        else:
            end = packed.whole(start + count)
            keys, values = packed.pool.read(module.layer_idx, lane, end)  # type: ignore[arg-type]
        rows = query[0, :, row : row + count]
        sliding = window if start + count > window else 0
        if s_aux is not None:
            seen = packed.seen(start, count, sliding)
            outputs.append(_with_sinks(rows, keys, values, seen, scaling, s_aux))
        else:
            outputs.append(_segment(packed, rows, keys, values, start, sliding, scaling))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return together.transpose(0, 1)[None], None


def _segment(
    packed: PackedPass, query: Tensor, keys: Tensor, values: Tensor, start: int, window: int, scaling: float | None
) -> Tensor:
    """One lane: query [heads, n, dim] over keys, values [kv_heads, length, dim] -> [heads, n, dim]."""
    heads, count, _ = query.shape
    groups = heads // keys.shape[0]
    if start == 0 and not window and count > 1:  # a whole sequence: no mask is needed, and half of the work is skipped
        shared = groups > 1
        return F.scaled_dot_product_attention(
            query[None],
            keys[None, :, :count],
            values[None, :, :count],
            is_causal=True,
            scale=scaling,
            enable_gqa=shared,
        )[0]
    # The query heads of a group share keys: as rows of one head they need no copies of them.
    rows = query.reshape(1, keys.shape[0], groups * count, -1)
    # A single row sees all of its past; but sums without a mask are other sums.
    free = count == 1 and not window and not packed.independent
    mask = None if free else packed.mask(start, count, window, groups, query)
    return _attend(packed, rows, keys[None], values[None], mask, scaling).reshape(heads, count, -1)


def _padded(
    module: nn.Module, query: Tensor, packed: PackedPass, window: int, scaling: float | None, kv_heads: int
) -> Tensor:
    """All lanes in one call; returns [M, heads, dim] for query [1, heads, M, dim]."""
    lanes, width = packed.shape
    keys, values = packed.pool.read_all(module.layer_idx, lanes, packed.longest)  # type: ignore[union-attr, arg-type]
    heads, dim = query.shape[1], query.shape[3]
    rows = query.new_zeros(lanes, width, heads, dim)
    rows[packed.slots] = query[0].transpose(0, 1)
    folded = rows.transpose(1, 2).reshape(lanes, kv_heads, heads // kv_heads * width, dim)
    mask = packed.lane_mask(window, heads // kv_heads, query)
    out = _attend(packed, folded, keys, values, mask, scaling)
    return out.reshape(lanes, heads, width, dim).transpose(1, 2)[packed.slots]


def _attend(
    packed: PackedPass, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Rows [lanes, kv_heads, n, dim] over keys, values [lanes, kv_heads, length, dim]; very few rows get company."""
    count = rows.shape[2]
    if not packed.independent or count >= COMPANY:
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    rows = torch.cat([rows, rows[:, :, -1:].expand(-1, -1, COMPANY - count, -1)], dim=2)
    if mask is not None:
        mask = torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], COMPANY - count, -1)], dim=-2)
    return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)[:, :, :count]


def _with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float | None, sinks: Tensor
) -> Tensor:
    """Attention of query [heads, n, dim] in which every head may also put its weight on a sink (gpt-oss)."""
    grouped = query.unflatten(0, (keys.shape[0], -1))
    scores = torch.einsum("hgnd,hsd->hgns", grouped, keys) * (scaling or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~seen, float("-inf"))
    sink = sinks.to(scores.dtype).reshape(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hgns,hsd->hgnd", weights, values).flatten(0, 1)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Packed attention makes its own masks."""


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
