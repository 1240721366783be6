"""How much each candidate of a block counts: objects of their own, apart from the losses.

A weight that depends on what the drafter says (`needs_results`) is handed a `FirstPass`, which `step.py` computes
without gradients before the loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FirstPass:
    """What the drafter says about every supervised candidate, without gradients."""

    candidates: Tensor  # [N, K] int64, the drafter's argmax; -1 where not supervised
    agrees: Tensor  # [N, K] bool, the candidate is the token it should be (teacher's choice, else the data token)
    confidence: Tensor  # [N, K] probability the drafter gives that token; 0 where not supervised


class PositionWeight(ABC):
    """Weights [N, K] from the mask of supervised candidates; 0 where not supervised."""

    needs_results: bool = False

    @abstractmethod
    def __call__(self, supervised: Tensor, results: FirstPass | None = None) -> Tensor:
        """Weights >= 0, fp32 [N, K]. `results` is given to weights that declare `needs_results`."""


class Uniform(PositionWeight):
    """Every supervised candidate counts 1."""

    def __call__(self, supervised: Tensor, results: FirstPass | None = None) -> Tensor:
        """1 where supervised."""
        return supervised.float()


class ExponentialDecay(PositionWeight):
    """w_k = exp(-(k - 1) / gamma), k = 1 .. K (DFlash, arXiv 2602.06036; DESIGN section 4).

    Args:
        gamma: in candidates; where not given 7 for block size 16 and in proportion for others (7 block_size / 16).
    """

    def __init__(self, gamma: float | None = None) -> None:
        if gamma is not None and not gamma > 0:
            raise ValueError(f"gamma must be positive, got {gamma}")
        self.gamma = gamma

    def __call__(self, supervised: Tensor, results: FirstPass | None = None) -> Tensor:
        """The decay of k where supervised."""
        candidates = supervised.shape[1]
        gamma = self.gamma or 7 * (candidates + 1) / 16
        steps = torch.arange(candidates, dtype=torch.float32, device=supervised.device)
        return torch.exp(-steps / gamma) * supervised


class DynamicConfidence(PositionWeight):
    """D-PACE (arXiv 2605.18810, eq. 7 and 8): weight by what a candidate is worth to the accepted length now.

    With q_k the probability the drafter gives the right token and q~ = (1 - alpha) q + alpha:
    w_k = sum_{m >= k} prod_{i <= m} q~_i over the supervised candidates. No gradient flows through the weights.

    Args:
        alpha: smoothing in (0, 1]; 1 gives K, K - 1, ... 1.
    """

    needs_results = True

    def __init__(self, alpha: float = 0.5) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        self.alpha = alpha

    def __call__(self, supervised: Tensor, results: FirstPass | None = None) -> Tensor:
        """Sums of the smoothed survival from k on."""
        assert results is not None, "DynamicConfidence needs a first pass"
        smoothed = (1 - self.alpha) * results.confidence + self.alpha
        survival = torch.where(supervised, smoothed, 0).cumprod(1)
        return survival.flip(1).cumsum(1).flip(1) * supervised


class FirstMismatch(PositionWeight):
    """A base weight up to and including the first candidate that disagrees, 0 after it: no later one is ever verified.

    Args:
        base: the weight that is cut off.
        after: factor of the candidates after the first mismatch.
    """

    needs_results = True

    def __init__(self, base: PositionWeight | None = None, after: float = 0.0) -> None:
        if not (0 <= after <= 1 and math.isfinite(after)):
            raise ValueError(f"after must be in [0, 1], got {after}")
        self.base, self.after = base or Uniform(), after

    def __call__(self, supervised: Tensor, results: FirstPass | None = None) -> Tensor:
        """The base where all candidates before agree, `after` times it elsewhere."""
        assert results is not None, "FirstMismatch needs a first pass"
        reached = torch.ones_like(supervised)
        reached[:, 1:] = results.agrees[:, :-1].long().cumprod(1).bool()
        return self.base(supervised, results) * torch.where(reached, 1.0, self.after)
