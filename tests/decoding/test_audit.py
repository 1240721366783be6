"""Proof B on a tiny model: rounding is told from a fault."""

from __future__ import annotations

import random

import pytest
import tiny
import torch

from adaflash.decoding.audit import Audit, audit
from adaflash.decoding.engine import Engine
from adaflash.targets import attention
from adaflash.types import Request


def audited(tokens: int = 60) -> Audit:
    half, full = (tiny.target("llama", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    with torch.no_grad():
        for name, parameter in full.model.named_parameters():
            parameter.copy_(dict(half.model.named_parameters())[name])
    result = Audit()
    for each in Engine(half, lanes=1).generate([Request(p.tokens, tokens) for p in tiny.prompts(4)]):
        audit(half, full, each.tokens, each.prompt_length, random.Random(0), result)
    return result


def test_bf16_texts_differ_by_rounding_only() -> None:
    result = audited()
    assert result.positions == 240 and 0 < result.rounding < 1
    assert not result.uncertified, str(result)


def test_a_fault_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two positions forgotten in windows of several tokens."""
    right = attention.PackedPass.seen

    def wrong(self: attention.PackedPass, start: int, count: int, window: int) -> torch.Tensor:
        seen = right(self, start, count, window)
        return seen & (torch.arange(seen.shape[1]) > 1) if start > 2 and count > 1 else seen

    monkeypatch.setattr(attention.PackedPass, "seen", wrong)
    result = audited()
    assert result.gaps
