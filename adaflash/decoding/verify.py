"""What the target makes of a window: how many candidates survive, and the token that follows them.

`exact` (the default) compares candidates with the target's own choices: the text does not depend on the drafter at
all. `rejection` accepts a sampled candidate d with probability min(1, p(d) / q(d)) and else samples from max(p - q, 0):
the text follows the target's law, but depends on the drafter. It is lossless only if the length is chosen without
looking at the candidates' own probabilities (ENGINE section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from adaflash.decoding.sampling import ACCEPT, RESIDUAL, choose_tokens, inverse_cdf, law, noise_at
from adaflash.types import Request

Verification = Literal["exact", "rejection"]


@dataclass(frozen=True)
class Draft:
    """One lane's round. `laws` [K, V] are the very distributions that candidates were sampled from, for rejection."""

    candidates: list[int] = field(default_factory=list)  # as many as were computed
    window: list[int] = field(default_factory=list)  # those sent to be verified
    laws: Tensor | None = None
    forecast: Tensor | None = None  # [1 + K] what the policy expected of it


@dataclass(frozen=True)
class Verdict:
    """Candidates accepted, and the target's token behind them."""

    accepted: int
    token: int


def agree(window: list[int], choices: list[int]) -> Verdict:
    """Exact match with choices that are known already: choices[j] is the target's token behind window[:j]."""
    accepted = next((i for i, (d, c) in enumerate(zip(window, choices, strict=False)) if d != c), len(window))
    return Verdict(accepted, choices[accepted])


def judge(request: Request, draft: Draft, logits: Tensor, first: int) -> Verdict:
    """Verdict over a sampled window: row j of logits [L + 1, V] is the target's for position first + j.

    Rows behind the first mismatch are not sampled at all.
    """
    for j, candidate in enumerate(draft.window):
        place = torch.tensor([first + j], device=logits.device)
        row = logits[j : j + 1]
        if draft.laws is None:
            token = int(choose_tokens(row, place, request))
            accepted = token == candidate
        else:
            accepted, token = _reject(request, candidate, draft.laws[j : j + 1], row, place)
        if not accepted:
            return Verdict(j, token)
    place = torch.tensor([first + len(draft.window)], device=logits.device)
    return Verdict(len(draft.window), int(choose_tokens(logits[len(draft.window) :][:1], place, request)))


def _reject(request: Request, candidate: int, q: Tensor, logits: Tensor, place: Tensor) -> tuple[bool, int]:
    """One step of rejection sampling: whether the candidate is accepted, and the token that replaces it if not."""
    p = law(logits, request)
    if bool(noise_at(request, place, ACCEPT) * q[:, candidate] < p[:, candidate]):
        return True, candidate
    rest = residual(p, q)
    return False, int(inverse_cdf(rest, noise_at(request, place, RESIDUAL)))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What replaces a rejected candidate is drawn from: max(p - q, 0), not normalised [M, V]; p where none is left."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
