"""Tiny targets with random weights, scaled so that they have opinions: identities need no trained model."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adaflash.drafters.dflash import DFlash
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt, Trajectory

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(_BASE, rope_parameters=_LLAMA3_ROPE),
    "qwen2": _BASE,
    "qwen3": dict(_BASE, tie_word_embeddings=True),
    "qwen3_moe": dict(_BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mistral": dict(_BASE, sliding_window=8),
    "gemma3_text": dict(_BASE, **_SLIDING, query_pre_attn_scalar=16, final_logit_softcapping=8.0),
    "gpt_oss": dict(_BASE, **_SLIDING, num_local_experts=4, num_experts_per_tok=2),
}


def model(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of a family, with weights large enough that its choices are clear."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**FAMILIES[family], **changes}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "embed" in name or "lm_head" in name:
                parameter.normal_(0, 1)
            elif parameter.ndim >= 2:
                parameter.mul_(8)
    return made.to(dtype).eval()


def target(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> HFTarget:
    """The adapter over such a model."""
    return HFTarget(model(family, seed, dtype, **changes))


def drafter(for_target: HFTarget, block_size: int = 8, seed: int = 1, noise: float = 0.0, **changes: Any) -> DFlash:
    """A two-layer drafter; noise is added to every weight, so that nothing in it is zero or one."""
    torch.manual_seed(seed)
    settings = {"num_layers": 2, "context_layers": [0, 2], "mask_id": VOCAB - 1, **changes}
    made = DFlash(block_size=block_size, **settings)
    made.build(for_target)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return made.to(for_target.dtype)


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[Prompt]:
    """Random prompts of 1 .. longest tokens."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    return [
        Prompt(f"p{i}", "abc"[i % 3], tuple(rng.randrange(VOCAB - 1) for _ in range(n))) for i, n in enumerate(lengths)
    ]


def oracle(of: PreTrainedModel) -> PreTrainedModel:
    """An independent copy that still has transformers' own attention."""
    made = copy.deepcopy(of)
    made.set_attn_implementation("eager")
    return made


def greedy(of: PreTrainedModel, prompt: tuple[int, ...], count: int, stops: tuple[int, ...] = ()) -> list[int]:
    """The response of transformers' own greedy decoding."""
    ids = torch.tensor([prompt])
    out = of.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        eos_token_id=list(stops) or None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def margin(of: PreTrainedModel, tokens: list[int], first: int) -> float:
    """Smallest top-1/top-2 margin of the choices at positions first .. end of a sequence."""
    with torch.no_grad():
        logits = of(torch.tensor([tokens])).logits[0, first - 1 : -1].double()
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def trajectory(
    for_target: HFTarget, drafted_by: DFlash, tokens: list[int], prompt_length: int, **changes: Any
) -> Trajectory:
    """A trajectory with states from one read, as `RecordedRollout` makes it."""
    from adaflash.length.fixed import FullBlock
    from adaflash.rollouts.base import Players
    from adaflash.rollouts.recorded import RecordedRollout

    prompt = Prompt(
        "t", "a", tuple(tokens[:prompt_length]), tuple(tokens[prompt_length:]), changes.get("finish", "length")
    )
    return RecordedRollout().collect([prompt], Players(for_target, drafted_by, FullBlock(), 0, 0))[0]
