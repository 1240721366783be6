"""Attention of a block over its context and over itself, and the decoder layer around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half


@dataclass(frozen=True)
class ContextSpan:
    """Keys and values [heads, S, dim] of one trajectory or lane, and the blocks that read them."""

    keys: Tensor
    values: Tensor
    first: int  # blocks first .. last - 1 read this span
    last: int
    visible: Tensor | None  # [last - first] block i sees positions < visible[i]; None: all S


def block_attention(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[ContextSpan], scale: float) -> Tensor:
    """Every slot sees its block's context before the anchor and all slots of its own block, nothing else.

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
    if span.visible is not None:
        hidden = torch.arange(span.keys.shape[1], device=q.device) >= span.visible[:, None]
        context_scores = context_scores.masked_fill(hidden[:, None], float("-inf"))
    weights = torch.cat([context_scores, own_scores], dim=-1).softmax(
        -1, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    on_context, on_own = weights.to(q.dtype).split([span.keys.shape[1], key.shape[1]], dim=-1)
    out = torch.einsum("hgnbs,hsd->nbhgd", on_context, span.values)
    return (out + torch.einsum("hgnbc,nchd->nbhgd", on_own, value[blocks])).flatten(2, 3)


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

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], spans: Sequence[ContextSpan]) -> Tensor:
        """Attention output [N, B, H] for block states [N, B, H]."""
        query = rotate(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), angles)
        keys, values = self.key_values(states, angles)
        return self.o_proj(block_attention(query, keys, values, spans, self.head_dim**-0.5).flatten(2, 3))


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

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], spans: Sequence[ContextSpan]) -> Tensor:
        """Block states [N, B, H] -> [N, B, H]."""
        states = states + self.self_attn(self.input_layernorm(states), angles, spans)
        return states + self.mlp(self.post_attention_layernorm(states))
