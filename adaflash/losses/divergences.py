"""Pure losses per candidate: fn(student [M, V], teacher [M, V], token [M]) -> [M], on logits, in nats.

Any dtype comes in; the arithmetic is fp32 in log-space (fp64 for fp64); the teacher is cut from the graph in every
one of them. p_S and p_T are the softmax of student and teacher. Directions are fixed by numbers: for teacher
(.9, .1) and student (.5, .5) forward KL is 0.368 and reverse KL 0.511.

Raises (all): NumericalError where a row has NaN or +inf, or is all -inf.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adaflash.losses.numerics import FLOOR, check_rows, kl_entries, log_probs

ClipMode = Literal["entry", "token", "none", "official"]
THRESHOLDS: dict[str, float] = {"entry": 0.01, "token": 1.0, "none": math.inf, "official": 0.01}


def teacher_choice(teacher: Tensor) -> Tensor:
    """The teacher's argmax [M], the first of equals."""
    check_rows(teacher, "teacher logits")
    return teacher.detach().argmax(-1)


def token_cross_entropy(student: Tensor, teacher: Tensor | None, token: Tensor) -> Tensor:
    """-log p_S(token): cross-entropy on the data token (DFlash, arXiv 2602.06036). The teacher is not looked at.

    0 for a token that the student cannot say, whose logit is -inf: no gradient could help.
    """
    at = token[:, None]
    loss = -log_probs(student, "student logits").gather(-1, at)
    return loss.masked_fill(student.detach().gather(-1, at) == -math.inf, 0.0).squeeze(-1)


def teacher_cross_entropy(student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """-log p_S(argmax p_T): cross-entropy on the teacher's own choice, not the data token (AdaFlash, the hard part)."""
    return token_cross_entropy(student, None, teacher_choice(teacher))


def forward_kl(student: Tensor, teacher: Tensor, token: Tensor, temperature: float = 1.0, top_k: int = 0) -> Tensor:
    """T^2 sum_v p_T (log p_T - log p_S), p = softmax(. / T): mass covering (Hinton et al. 2015, arXiv 1503.02531).

    With `top_k` over the teacher's k likeliest tokens and one more outcome, all others together.
    """
    log_s, log_t = _both(student, teacher, temperature, top_k)
    return temperature**2 * kl_entries(log_t, log_s).sum(-1)


def clip_limit(clip: ClipMode, threshold: float | None, total_weight: float | None) -> float:
    """Nats an entry (mode `entry`) or a token (the others) is clipped to."""
    limit = THRESHOLDS[clip] if threshold is None else threshold
    if clip != "official":
        return limit
    if total_weight is None:
        raise ValueError("clip mode 'official' needs total_weight, the sum of weights of the micro-batch")
    return limit * total_weight


class ReverseKLParts(NamedTuple):
    """What clipping did to each row."""

    clipped: Tensor  # [M] the loss, differentiable
    whole: Tensor  # [M] the divergence without clipping, detached
    cut: Tensor  # [M] how many entries (mode `entry`) or tokens (the others) met the threshold, detached
    out_of: int  # of how many a row


def reverse_kl_parts(
    student: Tensor,
    teacher: Tensor,
    clip: ClipMode = "entry",
    threshold: float | None = None,
    temperature: float = 1.0,
    total_weight: float | None = None,
    top_k: int = 0,
) -> ReverseKLParts:
    """Reverse KL before and after clipping; see `reverse_kl` for the formula of each mode."""
    limit = clip_limit(clip, threshold, total_weight)
    entries = kl_entries(*_both(student, teacher, temperature, top_k))
    square = temperature**2
    whole = square * entries.sum(-1)
    if clip == "entry":
        clipped = square * entries.clamp(max=limit).sum(-1)
        return ReverseKLParts(clipped, whole.detach(), (entries.detach() > limit).sum(-1), entries.shape[-1])
    if clip == "token":
        limit = limit * square  # min(KL, limit) first, T^2 after it
    cut = whole.detach() > limit
    return ReverseKLParts(whole.clamp(max=limit), whole.detach(), cut.long(), 1)


def reverse_kl(
    student: Tensor,
    teacher: Tensor,
    token: Tensor,
    clip: ClipMode = "entry",
    threshold: float | None = None,
    temperature: float = 1.0,
    total_weight: float | None = None,
    top_k: int = 0,
) -> Tensor:
    """Reverse KL sum_v d_v, d_v = p_S (log p_S - log p_T) - p_S + p_T >= 0, clipped (AdaFlash; DESIGN section 4).

    p = softmax(. / T), T = `temperature`; threshold in nats, default per mode:
        entry (0.01): T^2 sum_v min(d_v, threshold), the paper's wording;
        token (1.0): T^2 min(sum_v d_v, threshold);
        none: T^2 sum_v d_v;
        official (0.01): min(T^2 sum_v d_v, threshold W), W = `total_weight`, since the released code divides by the
            micro-batch's sum of weights before it clips: the only mode that depends on the batch.
    With `top_k` v runs over the teacher's k likeliest tokens and one more outcome, all others together: without it a
    student could lower the loss by leaving the set.
    """
    return reverse_kl_parts(student, teacher, clip, threshold, temperature, total_weight, top_k).clipped


def jensen_shannon(student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """(KL(p_S || m) + KL(p_T || m)) / 2, m = (p_S + p_T) / 2: between 0 and log 2 (Lin 1991; GKD, arXiv 2306.13649)."""
    log_s, log_t = _both(student, teacher)
    middle = torch.logaddexp(log_s, log_t) - math.log(2)
    return 0.5 * (kl_entries(log_s, middle) + kl_entries(log_t, middle)).sum(-1)


def total_variation(student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """sum_v |p_S - p_T| / 2 = 1 - acceptance under speculative sampling (Leviathan et al., arXiv 2211.17192)."""
    log_s, log_t = _both(student, teacher)
    return 0.5 * (log_s.exp() - log_t.exp()).abs().sum(-1)


def negative_log_acceptance(student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """-log sum_v min(p_S, p_T): minus the log of the chance that a sampled candidate survives (arXiv 2211.17192)."""
    log_s, log_t = _both(student, teacher)
    return -torch.logsumexp(torch.minimum(log_s, log_t), -1).clamp(max=0)


def _both(student: Tensor, teacher: Tensor, temperature: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
    log_s = log_probs(student, "student logits", temperature)
    log_t = log_probs(teacher.detach(), "teacher logits", temperature)
    if not 0 < top_k < log_t.shape[-1]:
        return log_s, log_t
    kept = log_t.topk(top_k).indices
    return _kept_and_rest(log_s, kept), _kept_and_rest(log_t, kept)


def _kept_and_rest(log_p: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities [M, k + 1] of the kept tokens [M, k] and of all others together."""
    rest = log_p.scatter(-1, kept, FLOOR).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, kept), rest], -1)
