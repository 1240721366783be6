"""config.json of a DFlash checkpoint as z-lab, SpecForge and SGLang read it (DESIGN section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaflash.export.rope import both_spellings

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash
    from adaflash.targets.hf import HFTarget


def layer_fields(drafter: DFlash) -> dict[str, Any]:
    """What every format says of the drafter's layers; attention is full and both ways in all of them."""
    config = drafter.config
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        **both_spellings(dict(config.rope_parameters or {})),
    }


def dflash_config(drafter: DFlash, target: HFTarget, dtype: str, bottleneck: int = 0) -> dict[str, Any]:
    """The whole config.json. `bottleneck` is the width of the paper's length head; 0 says that there is none."""
    head = {
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": bottleneck,
        "thresh_head_direct_len": True,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "torch_dtype": dtype,  # the name older readers know
        **layer_fields(drafter),
        "max_window_layers": drafter.config.num_hidden_layers,
        "use_cache": True,
        "block_size": drafter.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": {
            "block_size": drafter.block_size,
            "mask_token_id": drafter.mask_id,
            "target_layer_ids": list(drafter.context_layers),
            **(head if bottleneck else {}),
        },
    }
