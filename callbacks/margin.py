"""A loss for greedy serving: only the teacher's choice has to win, and by a margin.

    trainer:
      callbacks+:
        - class_path: adaflash.callbacks.margin.Margin
          init_args: {weight: 0.1, margin: 1.0}

Logged as `loss/margin`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.losses import LossTerm
from adaflash.plugin import LossPlugin


class MarginTerm(LossTerm):
    """max(0, margin - (s_y - max of the other logits)), y = argmax of the teacher: a hinge on the logit gap.

    Zero once the choice is safe, so that what the drafter already gets right stops pulling (Crammer and Singer 2001).

    Args:
        margin: wanted gap, in nats.
        weight: factor in the loss.
        name: unique name in the log.
    """

    covers = True  # infinite where the drafter cannot say the teacher's choice

    def __init__(self, margin: float = 1.0, weight: float = 0.1, name: str = "margin") -> None:
        super().__init__(weight, name)
        if not margin > 0:
            raise ValueError(f"margin must be positive, got {margin}")
        self.margin = margin

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """The hinge, [M]."""
        wanted = teacher.argmax(-1, keepdim=True)
        scores = student.float()
        others = scores.scatter(-1, wanted, -torch.inf).amax(-1)
        return (self.margin - scores.gather(-1, wanted).squeeze(-1) + others).clamp(min=0)


class Margin(LossPlugin):
    """Adds weight * hinge on the gap between the teacher's choice and the runner-up.

    Args:
        margin: wanted gap, in nats.
        weight: factor in the loss.
        name: unique name in the log.
    """

    def __init__(self, margin: float = 1.0, weight: float = 0.1, name: str = "margin") -> None:
        super().__init__(MarginTerm(margin, weight, name))
