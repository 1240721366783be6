"""transformers' own DFlash generator (batch 1) as an independent oracle: the same proposals in the same rounds."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from adaflash.decoding.engine import Engine
from adaflash.drafters.dflash import DFlash
from adaflash.types import Request

LONG, BLOCK = 24, 6


def theirs(ours: DFlash) -> MuseGlimmerAssistantModel:
    """Our weights in transformers' DFlash model, under its names."""
    c = ours.config
    config = MuseGlimmerAssistantConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope_parameters), layer_types=["full_attention"] * 2,
        block_size=ours.block_size, mask_token_id=ours.mask_id, target_layer_ids=list(ours.context_layers),
        max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = MuseGlimmerAssistantModel(config).to(ours.fc.weight.dtype).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(name, name): value for name, value in ours.state_dict().items()})
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_proposals_are_transformers_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(family, dtype=torch.float64)
    oracle = tiny.oracle(model)
    target = tiny.HFTarget(model)
    drafter = tiny.drafter(target, BLOCK, noise=0.05)
    seen: list[tuple[int, list[int]]] = []
    right = DFlashTokenCandidateGenerator.get_candidates

    def record(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = right(self, input_ids, *args, **kwargs)
        if logits is not None:
            length = input_ids.shape[1]
            seen.append((length - 1, candidates[0, length:].tolist()))
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record)
    rounds = 0
    for prompt in (p.tokens for p in tiny.prompts(4, seed=2) if len(p.tokens) > 1):
        seen.clear()
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=theirs(drafter), speculation_type="dflash",
            max_new_tokens=LONG, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        (ours,) = Engine(target, drafter, all_candidates=True).generate([Request(prompt, LONG)])
        assert ours.response.tolist() == out[0, len(prompt) :].tolist()
        log = list(zip(ours.blocks.anchors.tolist(), ours.blocks.candidates.tolist(), strict=True))
        assert log == seen[: len(log)]  # near the limit theirs drafts once more than is of use
        rounds += len(log)
    assert rounds > 20
