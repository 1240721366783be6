"""Proof B (ENGINE section 2): is a half-precision text the target's own, up to rounding?

A plain text is read again, teacher-forced, in blocks of random width. Where a block's choice is not the text's token, a
certificate is asked of the same model in fp32: both tokens must lie within the measured rounding of each other there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaflash.decoding.cache import LanePool
from adaflash.targets.hf import HFTarget
from adaflash.types import Segments


@dataclass
class Audit:
    """What one or more texts showed."""

    positions: int = 0  # choices compared
    rounding: float = 0.0  # largest distance of a logit between formats, both read alike, at a text's own tokens
    gaps: list[float] = field(default_factory=list)  # fp32 distance of the two tokens at every mismatch

    @property
    def uncertified(self) -> list[float]:
        """Mismatches that rounding does not explain: each of two logits may be off by the rounding."""
        return [gap for gap in self.gaps if gap > 2 * self.rounding]

    def __str__(self) -> str:
        return (
            f"{self.positions} positions, {len(self.gaps)} mismatches, {len(self.uncertified)} of them not explained by "
            f"rounding ({self.rounding:.3g}); largest fp32 gap {max(self.gaps, default=0.0):.3g}"
        )


@torch.no_grad()
def audit(half: HFTarget, full: HFTarget, tokens: Tensor, prompt_length: int, rng: random.Random, into: Audit) -> None:
    """Add one plain text [E] of `half`, with prompt, to an audit; `full` is the same model in fp32."""
    exact = torch.cat(list(blocks(full, tokens, [len(tokens)])))
    widths: list[int] = []
    while sum(widths) < len(tokens) - prompt_length:
        widths.append(rng.randint(1, 16))
    read = torch.cat(list(blocks(half, tokens, [prompt_length, *widths])))
    rows = torch.arange(prompt_length - 1, len(tokens) - 1)
    text, choices = tokens[rows + 1], read[rows].argmax(-1).cpu()
    into.positions += len(rows)
    for place in (text, choices):
        own = place[:, None].to(exact.device)
        distance = read[rows].float().gather(1, own) - exact[rows].float().gather(1, own)
        into.rounding = max(into.rounding, float(distance.abs().max()))
    for row, token, choice in zip(rows.tolist(), text.tolist(), choices.tolist(), strict=True):
        if token != choice:
            into.gaps.append(abs(float(exact[row, token] - exact[row, choice])))


def blocks(target: HFTarget, tokens: Tensor, widths: list[int]) -> Iterator[Tensor]:
    """Logits [n, V] of consecutive blocks of a text, read through a pool as the engine reads windows."""
    pool, start = LanePool(1, len(tokens)), 0
    for width in widths:
        part = tokens[start : start + width].to(target.device)
        if len(part):
            hidden = target.read(part, Segments((0,), (start,), (len(part),)), (), pool).hidden
            yield target.head(hidden)
        start += width
