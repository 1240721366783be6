"""Which candidates of a round are worth their verification: the exact choice for any cost."""

from __future__ import annotations

import torch
from torch import Tensor


def best_lengths(survival: Tensor, limits: Tensor, cost: Tensor, price: float) -> Tensor:
    """Lengths int64 [R] that maximise G - price * cost over all prefixes of all requests together.

    With the m candidates of largest survival (ties: the smaller k, then the earlier request), which is closed under
    prefixes because S_k never rises with k: m* = argmax_m G(m) - price * cost[m], G the sum of the m largest (ties: the
    smaller m). All m are looked at: costs go up in stairs, and stopping at the first fall loses up to 42 %.

    Args:
        survival: [R, K] S_k, not rising with k.
        limits: [R] int64, candidates of each request that may be sent.
        cost: [>= R * K + 1] seconds of a round that verifies m candidates, m = 0, 1, ...
        price: Tokens a second is worth.
    """
    requests, candidates = survival.shape
    places = torch.arange(candidates)
    allowed = places < limits.cpu()[:, None]
    # Candidates in the order (k, request), so that a stable sort settles ties as promised.
    chance = survival.detach().cpu().double().T.reshape(-1)[allowed.T.reshape(-1)]
    owner = torch.arange(requests).repeat(candidates)[allowed.T.reshape(-1)]
    order = chance.argsort(descending=True, stable=True)
    gained = torch.cat([torch.zeros(1, dtype=torch.float64), chance[order].cumsum(0)])
    value = gained - price * cost[: len(gained)]
    best = int((value == value.max()).nonzero()[0, 0])
    return torch.bincount(owner[order[:best]], minlength=requests)
