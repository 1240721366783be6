"""Which model families are proven to decode losslessly here, and their quirks."""

from __future__ import annotations

from typing import Any

from adaflash.errors import UserError

# Each has a tiny random config in tests/decoding/test_lossless.py that must pass the identity tests.
PROVEN = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "gpt_oss")


class UnsupportedTarget(UserError):
    """The target's family is not proven, so nothing can be promised about its output."""


def check_family(config: Any) -> None:
    """Refuse by name a family that is not proven, before any work starts."""
    family = getattr(config, "model_type", "unknown")
    if family not in PROVEN:
        raise UnsupportedTarget(
            f"target family '{family}' is not proven to decode losslessly here. Proven families: {', '.join(PROVEN)}. "
            "Add it to adaflash/targets/families.py together with a tiny config in tests/decoding/test_lossless.py."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise UnsupportedTarget(
            f"target family '{family}' has layers of kind {sorted(kinds)}; only full and sliding-window attention can "
            "be rolled back by not advancing (a recurrent state can not)."
        )


def final_softcap(config: Any) -> float | None:
    """Soft cap c of the final logits (c tanh(logits / c)), or None."""
    return getattr(config, "final_logit_softcapping", None)
