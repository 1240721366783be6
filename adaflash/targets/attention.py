"""Attention over packed rows: every segment attends to its own lane, causally, whatever the others do.

Registered with transformers under the name `packed_lanes`; the segments and the pool of a pass travel as keyword
arguments of the model's forward. Linear layers then cost exactly the rows sent, so a shorter length pays.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adaflash.types import KeyValues, Segments

NAME = "packed_lanes"  # a name with "flash" in it is taken for a flash-attention kernel


class PackedPass:
    """One forward over packed rows: where they stand, where their past is, and the masks all layers share."""

    def __init__(self, segments: Segments, pool: KeyValues | None = None) -> None:
        self.segments = segments
        self.pool = pool
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def mask(self, start: int, count: int, window: int, device: torch.device) -> Tensor:
        """Which of the positions 0 .. start + count - 1 each of the `count` new rows sees, bool [count, start + count]."""
        key = (start, count, window)
        if key not in self._masks:
            query = torch.arange(start, start + count, device=device)[:, None]
            past = torch.arange(start + count, device=device)
            seen = past <= query
            self._masks[key] = seen & (past > query - window) if window else seen
        return self._masks[key]


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
    segments, outputs = packed.segments, []
    for lane, start, count, row in zip(segments.lanes, segments.starts, segments.counts, segments.offsets, strict=False):
        if packed.pool is None:
            keys, values = key[0, :, row : row + count], value[0, :, row : row + count]
        else:
            keys, values = packed.pool.read(module.layer_idx, lane, start + count)  # type: ignore[arg-type]
        sliding = sliding_window if sliding_window and start + count > sliding_window else 0
        causal = start == 0 and not sliding  # the whole sequence at once: no mask tensor needed
        free = count == 1 and not sliding  # a single row sees all of its past
        mask = None if causal or free else packed.mask(start, count, sliding, query.device)
        rows = query[:, :, row : row + count]
        if s_aux is not None:
            outputs.append(_with_sinks(rows, keys, values, packed.mask(start, count, sliding, query.device), scaling, s_aux))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                rows,
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=causal and count > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[0],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None, sinks: Tensor
) -> Tensor:
    """Attention of query [1, heads, n, dim] in which every head may also put its weight on a sink (gpt-oss)."""
    grouped = query[0].unflatten(0, (keys.shape[0], -1))
    scores = torch.einsum("hgnd,hsd->hgns", grouped, keys) * (scaling or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.to(scores.dtype).reshape(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hgns,hsd->hgnd", weights, values).flatten(0, 1)[None]


def _no_mask(*args: object, **kwargs: object) -> None:
    """Packed attention makes its own masks."""


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
