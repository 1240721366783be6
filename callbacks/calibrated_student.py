"""A loss term with a weight of its own: a temperature that learns how sure the drafter may be.

    trainer:
      callbacks+:
        - class_path: adaflash.callbacks.calibrated_student.CalibratedStudent
          init_args: {weight: 0.1}

Logged as `loss/calibration`. The example of a term that is trained: its parameter joins the optimizer and the
checkpoint because the plugin registers it before either is made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaflash.losses import LossTerm
from adaflash.plugin import LossPlugin


class CalibrationTerm(LossTerm):
    """Cross-entropy to the teacher's distribution at a learned temperature, -sum p_T log softmax(s / exp(t)).

    The temperature takes up how sure the drafter is in general (Guo et al. 2017, arXiv 1706.04599), so that the
    gradient that reaches the drafter is about which tokens, not how peaked.

    Args:
        weight: factor in the loss.
        name: unique name in the log.
    """

    covers = True  # infinite where the drafter cannot say what the teacher may

    def __init__(self, weight: float = 0.1, name: str = "calibration") -> None:
        super().__init__(weight, name)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """The cross-entropy, [M]."""
        log_p = torch.log_softmax(student.float() / self.log_temperature.exp(), -1).clamp(min=-1e5)
        return -(teacher.float().softmax(-1) * log_p).sum(-1)


class CalibratedStudent(LossPlugin):
    """Adds weight * cross-entropy to the teacher at a learned temperature.

    Args:
        weight: factor in the loss.
        name: unique name in the log.
    """

    def __init__(self, weight: float = 0.1, name: str = "calibration") -> None:
        super().__init__(CalibrationTerm(weight, name))
