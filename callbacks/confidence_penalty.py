"""A loss of your own in one file: keep the drafter from being surer than it should be.

Add it to any run without touching the package:

    trainer:
      callbacks+:
        - class_path: adaflash.callbacks.confidence_penalty.ConfidencePenalty
          init_args: {weight: 0.01}

It is logged as `loss/confidence_penalty`. To write another: copy this file, replace the function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.losses import FunctionTerm
from adaflash.plugin import LossPlugin


def negative_entropy(student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """sum_v p_S log p_S, in nats: [M, V] -> [M] (Pereyra et al. 2017, arXiv 1701.06548)."""
    log_p = torch.log_softmax(student.float(), -1).clamp(min=-1e5)
    return (log_p.exp() * log_p).sum(-1)


class ConfidencePenalty(LossPlugin):
    """Adds weight * sum p log p of the drafter to the loss of each candidate.

    Args:
        weight: factor in the loss; 0.01 to 0.1.
        name: unique name in the log.
    """

    def __init__(self, weight: float = 0.01, name: str = "confidence_penalty") -> None:
        super().__init__(FunctionTerm(negative_entropy, weight, name, needs_teacher=False))
