"""The target's choice at a position: a pure function of its logits, the request's seed and the position.

Exact-match verification with position-keyed noise (ENGINE section 2): sampled text is the same with and without a
drafter, at any batch size and with any length policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaflash.types import Request


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# The odd constants of splitmix64 (Steele, Lea and Flood 2014); int64 arithmetic wraps, which is what a mixer wants.
_GOLDEN, _MIX1, _MIX2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) for each (seed, position), float64 with 52 random bits: it can round to neither end."""
    key = _mix(_mix(seeds * _GOLDEN + _MIX1) + positions * _GOLDEN)
    return (_shift(_mix(key + _GOLDEN), 12).double() + 0.5) * 2.0**-52


def filtered_probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The law that is sampled, float64 [M, V]: temperature, then top-k, then top-p, then softmax.

    Top-p keeps the smallest set of most probable tokens whose mass reaches top_p. Ties are kept by token id.
    """
    scores = logits.double() / temperature
    if 0 < top_k < scores.shape[-1]:
        kept = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, kept.indices, kept.values)
    probability = scores.softmax(-1)
    if top_p < 1.0:
        ordered, order = probability.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        probability = probability.masked_fill(outside.scatter(-1, order, outside), 0.0)
        probability = probability / probability.sum(-1, keepdim=True)
    return probability


def choose_tokens(logits: Tensor, positions: Tensor, request: Request) -> Tensor:
    """The target's tokens int64 [M] at `positions` [M] from logits [M, V]: argmax, or the inverse CDF at one uniform."""
    if request.temperature == 0.0:
        return logits.argmax(-1)
    probability = filtered_probabilities(logits, request.temperature, request.top_k, request.top_p)
    cdf = probability.cumsum(-1)
    noise = uniform(torch.full_like(positions, request.seed), positions) * cdf[:, -1]
    # The first token whose cumulated mass exceeds the noise; a token of no mass can never be it.
    return torch.searchsorted(cdf, noise[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def choose_packed(logits: Tensor, positions: Sequence[Tensor], requests: Sequence[Request]) -> Tensor:
    """`choose_tokens` over packed rows of several requests, [M]."""
    if all(request.temperature == 0.0 for request in requests):
        return logits.argmax(-1)
    parts = logits.split([len(p) for p in positions])
    return torch.cat([choose_tokens(*each) for each in zip(parts, positions, requests, strict=True)])
