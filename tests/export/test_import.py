"""Drafters of other projects: their names, fields and layer numbers, each giving our block states; or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from exporting import make_source
from safetensors.torch import save_file

from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.config import dflash_config
from adaflash.export.own import drafter_tensors, head_tensors, load_drafter
from adaflash.export.probe import block_states
from adaflash.length.adaptive import AdaptiveLength
from adaflash.targets.hf import HFTarget

PROMPT = (5, 9, 2, 40, 41, 7)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def old_zlab(target: HFTarget, drafter: DFlash) -> dict[str, Any]:
    """Block size at the top level only, the old spelling of rope, a remote-code map, as z-lab's first checkpoints."""
    config = dflash_config(drafter, target, "bfloat16")
    for name in ("rope_parameters", "torch_dtype"):
        config.pop(name)
    config["dflash_config"].pop("block_size")
    return {**config, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 1, "eos_token_id": 2}


def new_zlab(target: HFTarget, drafter: DFlash) -> dict[str, Any]:
    """Block size nested, the new spelling only."""
    config = dflash_config(drafter, target, "bfloat16")
    for name in ("block_size", "rope_theta", "rope_scaling"):
        config.pop(name)
    return config


def speculators(target: HFTarget, drafter: DFlash) -> dict[str, Any]:
    flat = dflash_config(drafter, target, "bfloat16")
    layer = {name: flat[name] for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act",
    )}  # fmt: skip
    verifier = {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": drafter.block_size - 1}]
    return {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "proposal_methods": methods, "verifier": verifier},
        "transformer_layer_config": {"model_type": "qwen3", **layer}, "draft_vocab_size": flat["vocab_size"],
        "block_size": drafter.block_size, "mask_token_id": drafter.mask_id, "sample_from_anchor": False,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in drafter.context_layers],
    }  # fmt: skip


def torchspec(target: HFTarget, drafter: DFlash) -> dict[str, Any]:
    """There num_target_layers counts the layers that are read, and everything lies at the top level."""
    flat = old_zlab(target, drafter)
    for name in ("dflash_config", "architectures", "auto_map"):
        flat.pop(name)
    return {
        **flat, "model_type": "dflash", "num_target_layers": len(drafter.context_layers), "markov_rank": 0,
        "target_num_hidden_layers": target.num_layers, "target_layer_ids": list(drafter.context_layers),
        "mask_token_id": drafter.mask_id, "block_size": drafter.block_size, "enable_confidence_head": False,
    }  # fmt: skip


TORCHSPEC_NAMES = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}


def torchspec_names(tensors: dict[str, Any], target: HFTarget) -> dict[str, Any]:
    names = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }
    embedding = target.model.get_input_embeddings().weight.data.clone()
    return {**{names.get(name, name): value for name, value in tensors.items()}, "embed_tokens.weight": embedding}


def with_copies(tensors: dict[str, Any], target: HFTarget) -> dict[str, Any]:
    """As speculators wrote them before 0.9: the verifier's embedding, head and norm beside the drafter."""
    embedding = target.model.get_input_embeddings().weight.data.clone()
    head = target.model.get_output_embeddings().weight.data.clone()
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": head, "verifier_lm_head.weight": head.clone()}
    return {**tensors, **copies, "verifier_norm.weight": torch.ones(target.hidden_size)}


PROJECTS: dict[str, tuple[Any, Any, str]] = {
    "z-lab, first": (old_zlab, None, "z-lab"),
    "z-lab, newer": (new_zlab, None, "z-lab"),
    "SpecForge, wrapped": (
        old_zlab,
        lambda t, _: {f"draft_model.{name}": value for name, value in t.items()},
        "SpecForge",
    ),
    "SGLang, prefixed": (new_zlab, lambda t, _: {f"model.{name}": value for name, value in t.items()}, "SGLang"),
    "speculators": (speculators, None, "speculators"),
    "speculators, with copies": (speculators, with_copies, "speculators"),
    "TorchSpec": (torchspec, torchspec_names, "TorchSpec"),
}


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_their_drafter_is_ours(project: str, family: str, tmp_path: Path) -> None:
    config, names, source = PROJECTS[project]
    target = tiny.target(family)
    drafter = make_source(target).drafter
    tensors = drafter_tensors(drafter)
    folder = write(tmp_path / "theirs", config(target, drafter), names(tensors, target) if names else tensors)
    again, head = load_drafter(folder, target)
    assert head == {} and source
    for one, other in zip(block_states(again, target, PROMPT), block_states(drafter, target, PROMPT), strict=True):
        assert torch.equal(one, other)
    assert (again.context_layers, again.mask_id, again.block_size) == ((0, 2), 96, 8)


def test_official_adaflash_with_its_length_head(tmp_path: Path) -> None:
    target = tiny.target()
    source = make_source(target)
    config = old_zlab(target, source.drafter)
    config["dflash_config"] |= {
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 256,
        "thresh_head_direct_len": True,
    }
    folder = write(tmp_path / "theirs", config, {**drafter_tensors(source.drafter), **head_tensors(source.length)})
    policy = AdaptiveLength(checkpoint=str(folder))
    policy.build(target.hidden_size, 8)
    hidden = torch.randn(3, 8, target.hidden_size)
    assert source.length is not None and torch.equal(policy.head(hidden), source.length.head(hidden))  # type: ignore[operator]
    bare = write(tmp_path / "bare", old_zlab(target, source.drafter), drafter_tensors(source.drafter))
    with pytest.raises(UserError, match="no length head"):
        AdaptiveLength(checkpoint=str(bare)).build(target.hidden_size, 8)
    with pytest.raises(UserError, match=r"length\.init_args\.checkpoint.*does not fit"):
        AdaptiveLength(checkpoint=str(folder)).build(32, 8)


FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # config, extra tensors, message
    "DeepSpec": (
        {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 0}, {}, r"DeepSpec.*shifted head",
    ),
    "Markov head": ({"markov_rank": 16}, {}, "DeepSpec / DSpark"),
    "confidence head": ({}, {"confidence_head.proj.weight": torch.ones(1, 64)}, "DeepSpec / DSpark"),
    "anchor predicts": ({"sample_from_anchor": True}, {}, "samples from its anchor"),
    "shifted label": ({"dflash": {"shift_label": True}}, {}, "samples from its anchor"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, {}, "DFlash2"),
    "Domino": ({"dflash": {"projector_type": "domino"}}, {}, "Domino"),
    "d2t": ({"draft_vocab_size": 50}, {"d2t": torch.zeros(50)}, "reduced vocabulary"),
    "sliding": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, {}, "sliding-window"),
    "all sliding": ({"dflash": {"use_swa": True}}, {}, "sliding-window"),
    "causal": ({"dflash": {"causal": True}}, {}, "causal"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantised"),
    "sinks": ({"dflash": {"attention_sink_bias": True}}, {}, "attention sinks"),
    "bias": ({"attention_bias": True}, {}, "biases"),
    "multiplier": ({"dflash": {"output_multiplier": 2.0}}, {}, "logits of its own"),
    "prob head": ({}, {"prob_head.out.weight": torch.ones(1, 64)}, r"Unknown: prob_head"),
    "half rotated": ({"partial_rotary_factor": 0.5}, {}, "rotates whole heads"),
    "gelu": ({"hidden_act": "gelu"}, {}, "hidden_act"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_only_looks_like_dflash_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    changes, extra, message = FOREIGN[kind]
    target = tiny.target()
    drafter = make_source(target).drafter
    config = new_zlab(target, drafter)
    config["dflash_config"] |= changes.get("dflash", {})
    config |= {name: value for name, value in changes.items() if name != "dflash"}
    folder = write(tmp_path / "theirs", config, {**drafter_tensors(drafter), **extra})
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target)


def test_speculators_counts_and_copies(tmp_path: Path) -> None:
    target = tiny.target()
    drafter = make_source(target).drafter
    config = speculators(target, drafter)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 8
    with pytest.raises(UserError, match=r"speculative_tokens is 8 for a block_size of 8.*must be 7"):
        load_drafter(write(tmp_path / "a", config, drafter_tensors(drafter)), target)
    config = {**speculators(target, drafter), "aux_hidden_state_layer_ids": [0, 3]}
    with pytest.raises(UserError, match=r"read the embedding \(0\)"):
        load_drafter(write(tmp_path / "b", config, drafter_tensors(drafter)), target)
    own = {"embed_tokens.weight": torch.randn(97, 64)}
    with pytest.raises(UserError, match=r"made for org/target.*embed_tokens.weight is weights of its own"):
        load_drafter(write(tmp_path / "c", speculators(target, drafter), {**drafter_tensors(drafter), **own}), target)


def test_going_on_from_an_imported_drafter(tmp_path: Path) -> None:
    """`checkpoint:` takes over weights and architecture; a setting that contradicts it is named with its value."""
    target = tiny.target()
    theirs = make_source(target).drafter
    folder = str(
        write(
            tmp_path / "theirs", new_zlab(target, theirs), {k: v.bfloat16() for k, v in drafter_tensors(theirs).items()}
        )
    )
    ours = DFlash(num_layers=5, block_size=8, checkpoint=folder)
    ours.build(target)
    ours.build(target)
    assert ours.num_layers == 2 and ours.context_layers == (0, 2) and ours.mask_id == 96 and folder in ours.mask_source
    assert {p.dtype for p in ours.parameters()} == {torch.float32} and all(p.requires_grad for p in ours.parameters())
    assert torch.allclose(ours.fc.weight, theirs.fc.weight, rtol=1e-2)
    for settings, message in (
        ({"block_size": 4}, r"block_size is 4, the drafter of .* has 8.*--model\.drafter\.init_args\.block_size 8"),
        ({"block_size": 8, "context_layers": [0, 1]}, r"context_layers is \[0, 1\].*has \[0, 2\]"),
        ({"block_size": 8, "mask_id": 5}, r"mask_id is 5, the drafter of .* has 96"),
    ):
        with pytest.raises(UserError, match=message):
            DFlash(**settings, checkpoint=folder).build(target)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no such folder"):
        DFlash(checkpoint=str(tmp_path / "gone")).build(target)


def test_shards(tmp_path: Path) -> None:
    target = tiny.target()
    drafter = make_source(target).drafter
    tensors = drafter_tensors(drafter)
    folder = write(tmp_path / "theirs", new_zlab(target, drafter), {"norm.weight": tensors.pop("norm.weight")})
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    save_file(tensors, folder / "model-00002.safetensors")
    where = {**dict.fromkeys(tensors, "model-00002.safetensors"), "norm.weight": "model-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(load_drafter(folder, target)[0].norm.weight, drafter.norm.weight)
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(UserError, match="damaged or missing"):
        load_drafter(folder, target)
