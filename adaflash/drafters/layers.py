"""Attention of a block over its context and over itself, and the decoder layer around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from adaflash.types import KeyValues, Segments


@dataclass(frozen=True)
class ContextSpan:
    """Keys and values [heads, S, dim] of one trajectory, and the blocks that read them."""

    keys: Tensor
    values: Tensor
    first: int  # blocks first .. last - 1 read this span
    last: int
    visible: Tensor  # [last - first] block i sees positions < visible[i]


class Attend(Protocol):
    """Attention of query [N, B, Hq, D] over the context and over key, value [N, B, Hkv, D]; returns [N, B, Hq, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor: ...


def block_attention(spans: Sequence[ContextSpan], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Training: every slot sees its block's context before the anchor and all slots of its own block, nothing else.

    query [N, B, Hq, D], key and value [N, B, Hkv, D]; returns [N, B, Hq, D]. One softmax over both sources, computed
    without copying the context for each block.
    """
    return torch.cat([_span_attention(query, key, value, span, scale) for span in spans])


def _span_attention(query: Tensor, key: Tensor, value: Tensor, span: ContextSpan, scale: float) -> Tensor:
    blocks = slice(span.first, span.last)
    heads, groups = key.shape[2], query.shape[2] // key.shape[2]
    q = query[blocks].unflatten(2, (heads, groups)) * scale
    own_scores = torch.einsum("nbhgd,nchd->hgnbc", q, key[blocks])
    context_scores = torch.einsum("nbhgd,hsd->hgnbs", q, span.keys)
    hidden = torch.arange(span.keys.shape[1], device=q.device) >= span.visible[:, None]
    context_scores = context_scores.masked_fill(hidden[:, None], float("-inf"))
    weights = torch.cat([context_scores, own_scores], dim=-1).softmax(
        -1, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    on_context, on_own = weights.to(q.dtype).split([span.keys.shape[1], key.shape[1]], dim=-1)
    out = torch.einsum("hgnbs,hsd->nbhgd", on_context, span.values)
    return (out + torch.einsum("hgnbc,nchd->nbhgd", on_own, value[blocks])).flatten(2, 3)


@dataclass(frozen=True)
class PooledBlocks:
    """Decoding: one block a lane, and the pool that holds the contexts; the whole batch in one call a layer.

    A block's own keys and values are written behind its context, where the next rows that are committed overwrite them.
    """

    pool: KeyValues
    segments: Segments  # where the blocks stand: a lane, an anchor and B slots each
    mask: Tensor | None  # additive [lanes, 1, 1, longest]: a lane sees its context and its block; None: one lane alone

    @classmethod
    def of(cls, pool: KeyValues, lanes: Sequence[int], anchors: Sequence[int], size: int, like: Tensor) -> PooledBlocks:
        """Blocks of `size` slots at `anchors`; the mask gets the format that `like` is computed in."""
        segments = Segments(tuple(lanes), tuple(anchors), (size,) * len(lanes))
        if len(lanes) == 1:
            return cls(pool, segments, None)
        ends = torch.full((max(lanes) + 1,), size, device=like.device)
        ends[torch.tensor(lanes, device=like.device)] += torch.tensor(anchors, device=like.device)
        seen = torch.arange(max(anchors) + size, device=like.device) < ends[:, None]
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
        return cls(pool, segments, mask[:, None, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [R, B, Hq, D] over context and block; key and value [R, B, Hkv, D] of the blocks. Returns like query."""
        _, size, heads, dim = query.shape
        self.pool.write(layer, key.to(value.dtype).flatten(0, 1), value.flatten(0, 1), self.segments)
        keys, values = self._read(layer, max(self.segments.starts) + size)
        # The query heads of a group share keys: as rows of one head they need no copies of them.
        folded = self._spread(query, len(keys)).transpose(1, 2).reshape(len(keys), keys.shape[1], -1, dim)
        mask = None if self.mask is None else self.mask.to(folded.dtype)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        out = out.reshape(len(keys), heads, size, dim).transpose(1, 2)
        return out if self._everyone(len(keys)) else out[list(self.segments.lanes)]

    def _read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Two views [lanes, Hkv, length, D]: of one lane alone, or of the first lanes of the pool."""
        lanes = self.segments.lanes
        if self.mask is None:
            keys, values = self.pool.read(layer, lanes[0], length)
            return keys[None], values[None]
        return self.pool.read_all(layer, max(lanes) + 1, length)

    def _everyone(self, lanes: int) -> bool:
        """Whether every lane that is read has a block, in order."""
        return self.mask is None or self.segments.lanes == tuple(range(lanes))

    def _spread(self, query: Tensor, lanes: int) -> Tensor:
        """Queries at their lanes; lanes without a block get zeros."""
        if self._everyone(lanes):
            return query
        rows = query.new_zeros(lanes, *query.shape[1:])
        rows[list(self.segments.lanes)] = query
        return rows


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of x [..., heads, dim] by (cos, sin) [..., dim]."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in angles)
    return x * cos + rotate_half(x) * sin


class ContextAttention(nn.Module):
    """Queries from the block; keys and values from the encoded context and from the block, through the same weights."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None  # `drafter_config` sets both
        self.head_dim = config.head_dim
        width, kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_values(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and values [..., heads, dim] of states [..., H]."""
        keys = self.k_proj(states).unflatten(-1, (-1, self.head_dim))
        values = self.v_proj(states).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(keys), angles), values

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Attention output [N, B, H] for block states [N, B, H]."""
        query = rotate(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), angles)
        keys, values = self.key_values(states, angles)
        return self.o_proj(attend(query, keys, values, scale=self.head_dim**-0.5).flatten(2, 3))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer whose attention also reads the context."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def key_values(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """See `ContextAttention.key_values`."""
        return self.self_attn.key_values(states, angles)

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Block states [N, B, H] -> [N, B, H]; `attend` lets their queries, keys and values meet the context."""
        states = states + self.self_attn(self.input_layernorm(states), angles, attend)
        return states + self.mlp(self.post_attention_layernorm(states))
