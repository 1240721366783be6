"""The terms that ship: each one line of YAML. Formulas and sources are in `divergences.py`.

model:
  losses:
    - {class_path: adaflash.losses.TeacherCrossEntropy, init_args: {weight: 0.8, name: ce}}
    - {class_path: adaflash.losses.ReverseKL, init_args: {weight: 0.2, name: rkl, clip: entry}}
"""

from __future__ import annotations

from torch import Tensor

from adaflash.losses import divergences
from adaflash.losses.base import Evaluation, LossTerm
from adaflash.losses.divergences import ClipMode


class TeacherCrossEntropy(LossTerm):
    """Cross-entropy against the teacher's argmax; 0 where the drafter cannot say it."""

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """-log p_S(argmax p_T), [M]."""
        return divergences.teacher_cross_entropy(student, teacher, token)


class TokenCrossEntropy(LossTerm):
    """Cross-entropy on the data token; needs no teacher."""

    needs_teacher = False

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """-log p_S(token), [M]."""
        return divergences.token_cross_entropy(student, teacher, token)


class ForwardKL(LossTerm):
    """KL(teacher || student).

    Args:
        temperature: softens both distributions; the loss is scaled by its square.
        top_k: only the teacher's k likeliest tokens, and all others as one outcome; 0 for the whole vocabulary.
        weight: factor of this term in the loss.
        name: unique name in the log.
    """

    covers = True

    def __init__(self, temperature: float = 1.0, top_k: int = 0, weight: float = 1.0, name: str = "") -> None:
        super().__init__(weight, name)
        self.temperature, self.top_k = _positive("temperature", temperature), top_k

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """T^2 KL(p_T || p_S), [M]."""
        return divergences.forward_kl(student, teacher, token, self.temperature, self.top_k)


class ReverseKL(LossTerm):
    """KL(student || teacher), clipped.

    Args:
        clip: what is clipped: each vocabulary `entry`, each `token`, nothing (`none`), or as the released code does
            (`official`, which depends on the batch).
        threshold: in nats; where not given 0.01 (entry), 1.0 (token), 0.01 times the sum of weights (official).
        temperature: softens both distributions; the loss is scaled by its square after clipping.
        top_k: only the teacher's k likeliest tokens, and all others as one outcome; 0 for the whole vocabulary.
        weight: factor of this term in the loss.
        name: unique name in the log.
    """

    share_names = ("removed", "cut")

    def __init__(
        self,
        clip: ClipMode = "entry",
        threshold: float | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        weight: float = 1.0,
        name: str = "",
    ) -> None:
        super().__init__(weight, name)
        self.top_k = top_k
        self.clip = clip
        self.threshold = divergences.THRESHOLDS[clip] if threshold is None else _positive("threshold", threshold)
        self.temperature = _positive("temperature", temperature)
        self.total_weight: float | None = None

    def begin(self, total_weight: float) -> None:
        """`official` divides by this before it clips."""
        self.total_weight = total_weight

    @property
    def limit(self) -> float:
        """What an entry or a token is clipped to, in nats, temperature apart."""
        return divergences.clip_limit(self.clip, self.threshold, self.total_weight)

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """The clipped divergence, [M]."""
        return self.evaluate(student, teacher, token).values

    def evaluate(self, student: Tensor, teacher: Tensor, token: Tensor) -> Evaluation:
        """The clipped divergence, with the shares of divergence removed and of entries (or tokens) cut."""
        parts = divergences.reverse_kl_parts(
            student, teacher, self.clip, self.threshold, self.temperature, self.total_weight, self.top_k
        )
        removed = parts.whole - parts.clipped.detach()
        out_of = parts.whole.new_full(parts.whole.shape, parts.out_of)
        return Evaluation(parts.clipped, {"removed": (removed, parts.whole), "cut": (parts.cut.to(out_of), out_of)})


class JensenShannon(LossTerm):
    """Jensen-Shannon divergence, symmetric and bounded by log 2."""

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """JS(p_S, p_T), [M]."""
        return divergences.jensen_shannon(student, teacher, token)


class TotalVariation(LossTerm):
    """Total variation distance: the rejection rate under speculative sampling."""

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """sum |p_S - p_T| / 2, [M]."""
        return divergences.total_variation(student, teacher, token)


class NegativeLogAcceptance(LossTerm):
    """Minus the log of the acceptance rate under speculative sampling."""

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """-log sum min(p_S, p_T), [M]."""
        return divergences.negative_log_acceptance(student, teacher, token)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value
