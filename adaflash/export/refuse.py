"""Drafters that look like DFlash and are not: each is refused by name, because loading it would only lower acceptance.

The list follows what checkpoints of other projects say in their config.json (ENGINE section 5, FAULTS K10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adaflash.errors import UserError

Config = dict[str, Any]
Rule = Callable[[Config, Config, set[str]], bool]


def _architecture(config: Config, word: str) -> bool:
    return any(word in str(name) for name in config.get("architectures") or [])


def _prefixed(keys: set[str], *prefixes: str) -> bool:
    return any(key.startswith(prefixes) for key in keys)


# (what it is, why it cannot be loaded, how it is recognised: top-level config, dflash_config, tensor names)
RULES: tuple[tuple[str, str, Rule], ...] = (
    (
        "a DeepSpec / DSpark drafter", "slot k predicts the token at anchor + 1 + k (a shifted head)",
        lambda c, d, k: _architecture(c, "DSpark") or {"num_anchors", "markov_rank"} <= set(c) or bool(c.get("markov_rank"))
        or c.get("speculators_model_type") == "dspark" or _prefixed(k, "markov_head.", "confidence_head."),
    ),
    (
        "a drafter that samples from its anchor", "slot 0 predicts too, so every candidate is shifted by one",
        lambda c, d, k: bool(c.get("sample_from_anchor")) or bool(d.get("shift_label") or c.get("shift_label")),
    ),
    (
        "a DFlash2 drafter", "it chooses among candidates with a selector and convolutions that are not in DFlash",
        lambda c, d, k: _architecture(c, "DFlash2") or c.get("speculators_model_type") == "dflash2"
        or bool(d.get("selector_rank") or d.get("conv_kernel_size")) or _prefixed(k, "candidate_selector."),
    ),
    (
        "a Domino drafter", "it corrects candidates with a recurrent projector",
        lambda c, d, k: "domino" in (d.get("projector_type"), c.get("projector_type"))
        or _prefixed(k, "prefix_gru.", "embed_proj."),
    ),
    (
        "a drafter with a reduced vocabulary of which d2t or t2d is missing", "nobody can tell which tokens its rows are",
        lambda c, d, k: (c.get("draft_vocab_size") not in (None, _vocabulary(c)) or bool({"d2t", "t2d"} & k))
        and not {"d2t", "t2d"} <= k,
    ),
    (
        "a drafter with sliding-window layers", "adaflash's drafter attends to the whole context and both ways",
        lambda c, d, k: "sliding_attention" in _layer_types(c) or bool(d.get("use_swa")),
    ),
    (
        "a causal drafter", "a block of DFlash is read both ways",
        lambda c, d, k: bool(d.get("causal") or c.get("is_causal")),
    ),
    (
        "a quantised drafter", "quantised drafters have been seen to lose all acceptance in silence",
        lambda c, d, k: bool(c.get("quantization_config")) or any(key.endswith(("qweight", "weight_scale")) for key in k),
    ),
    (
        "a drafter with attention sinks, biases or value scales", "adaflash's drafter has none",
        lambda c, d, k: bool(d.get("attention_sink_bias") or d.get("attention_value_scale"))
        or bool(_layer(c).get("attention_bias")) or any(key.endswith("sink_bias") for key in k),
    ),
    (
        "a drafter with scaled or capped logits of its own", "candidates come from the target's own head here",
        lambda c, d, k: d.get("output_multiplier", 1.0) != 1.0 or bool(d.get("final_logit_softcapping")),
    ),
)  # fmt: skip


def refuse_foreign(config: Config, keys: set[str], place: str) -> None:
    """Raise UserError for a checkpoint that is not plain DFlash. `keys` are the documented tensor names."""
    nested = config.get("dflash_config") or {}
    for what, why, rule in RULES:
        if rule(config, nested, keys):
            raise UserError(
                f"{place} is {what}: {why}. adaflash loads plain DFlash drafters (z-lab, SGLang, SpecForge, vLLM "
                "speculators, TorchSpec, AdaFlash); train one for this target with `adaflash fit`"
            )


def _layer(config: Config) -> Config:
    return config.get("transformer_layer_config") or config


def _layer_types(config: Config) -> list[str]:
    default = ["sliding_attention"] if config.get("model_type") == "muse_glimmer_assistant" else []  # that class's own
    return _layer(config).get("layer_types") or default


def _vocabulary(config: Config) -> Any:
    return _layer(config).get("vocab_size")
