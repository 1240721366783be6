"""Discrete-time survival of a block: hazards, their loss, and what censors.

a_k = P(candidate k accepted | all before it accepted), S_k = prod_{j <= k} a_j. A candidate is *at risk* while all
before it were accepted, and *known* while somebody could see whether it was. The loss is the likelihood of what was
seen: binary cross-entropy over candidates at risk and known. It is a proper score whatever the policy sent, as long as
what is sent depends on no more than the features see. (A plain mean over such logs is biased: 2.49 where 2.97 was true.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def at_risk(agreed: Tensor, known: Tensor) -> Tensor:
    """Candidates whose acceptance is seen given that all before were accepted, bool [N, K] from bool [N, K] each.

    The first rejected candidate is at risk; those behind it are not. One that is not known censors itself and the rest.
    """
    before = torch.cat([torch.ones_like(agreed[:, :1]), agreed[:, :-1]], 1)
    return (before & known).long().cumprod(1).bool()


def hazard_loss(logits: Tensor, agreed: Tensor, known: Tensor) -> Tensor:
    """Negative log-likelihood in nats, summed over candidates at risk; logits [N, K] of the a_k."""
    terms = F.binary_cross_entropy_with_logits(logits, agreed.to(logits.dtype), reduction="none")
    return terms.masked_fill(~at_risk(agreed, known), 0.0).sum()


def known_from_log(lengths: Tensor, known: Tensor) -> Tensor:
    """What a server's log tells [N, K]: candidates beyond the length [N] that was sent were never judged."""
    return known & (torch.arange(1, known.shape[1] + 1, device=known.device) <= lengths[:, None])


def survival(logits: Tensor) -> Tensor:
    """S_k [N, K], falling with k, from logits [N, K] of the hazards."""
    return logits.sigmoid().cumprod(1)
