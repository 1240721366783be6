"""Our checkpoint is a DFlash checkpoint of z-lab / SGLang: documented keys, every field, the same logits, or an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from exporting import edit
from safetensors.torch import load_file, save_file

from adaflash.decoding.engine import Engine
from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.own import load_drafter, load_length, rounded, save_drafter, write_drafter
from adaflash.export.probe import block_states
from adaflash.export.weights import new_folder
from adaflash.length.adaptive import AdaptiveLength
from adaflash.types import Request

PROMPT = (5, 9, 2, 40, 41, 7)
DTYPES = ["float32", "bfloat16", "float16"]


def length_head(target: tiny.HFTarget, block_size: int = 8) -> AdaptiveLength:
    torch.manual_seed(3)
    policy = AdaptiveLength()
    policy.build(target.hidden_size, block_size)
    return policy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text"])  # tied, untied, scaled embedding
def test_what_is_written_is_read(family: str, dtype: Any, tmp_path: Path) -> None:
    target = tiny.target(family)
    drafter, policy = tiny.drafter(target, noise=0.05), length_head(target)
    folder = save_drafter(drafter, policy, target, tmp_path / "out", dtype)
    again, state = load_drafter(folder, target)
    twin = rounded(drafter, target, load_file(folder / "model.safetensors"))
    for one, other in zip(block_states(again, target, PROMPT), block_states(twin, target, PROMPT), strict=True):
        assert torch.equal(target.head(one) if one.ndim == 3 else one, target.head(other) if other.ndim == 3 else other)
    assert (again.block_size, again.mask_id, again.context_layers) == (8, tiny.VOCAB - 1, (0, 2))
    hidden = torch.randn(3, 8, target.hidden_size)
    loaded = load_length(state, target, 8)
    assert torch.allclose(loaded.head(hidden), policy.head(hidden), atol=1e-2 if dtype != "float32" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_number_format(dtype: Any, tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), length_head(target), target, tmp_path / "out", dtype)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    parts = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm"
    parts += " mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"
    documented = {f"layers.{i}.{part}.weight" for i in range(2) for part in parts.split()}
    documented |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    documented |= {f"thresh_head_two_model.{n}.{w}" for n in ("down", "res.0", "out") for w in ("weight", "bias")}
    assert set(tensors) == documented
    assert {value.dtype for value in tensors.values()} == {getattr(torch, dtype)}
    assert config["dtype"] == config["torch_dtype"] == dtype
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (folder, *folder.rglob("*")))  # a server may read it
    assert tensors["fc.weight"].shape == (64, 128)
    assert tensors["thresh_head_two_model.down.weight"].shape == (256, 128)


def test_config_fields(tmp_path: Path) -> None:
    target = tiny.target("llama")
    folder = save_drafter(tiny.drafter(target), length_head(target), target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["num_target_layers"] == 4 and config["num_hidden_layers"] == 2
    assert config["dflash_config"] == {
        "block_size": 8, "mask_token_id": tiny.VOCAB - 1, "target_layer_ids": [0, 2], "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 256, "thresh_head_direct_len": True,
    }  # fmt: skip
    assert config["rope_theta"] == 10000.0 == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    assert config["layer_types"] == ["full_attention"] * 2


def test_default_layers_are_written_and_no_head_is_said(tmp_path: Path) -> None:
    target = tiny.target("qwen3", num_hidden_layers=6)
    drafter = DFlash(num_layers=1, num_context_layers=2, block_size=4, mask_id=96)
    drafter.build(target)
    folder = save_drafter(drafter, None, target, tmp_path / "out")
    nested = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert nested["target_layer_ids"] == [1, 3] and "use_thresh_head_two_model" not in nested
    assert load_drafter(folder, target)[1] == {}


@pytest.mark.parametrize("base", [1e6, 5e5])
def test_rotary_base_of_the_target(base: float, tmp_path: Path) -> None:
    """Whatever spelling the target's config has; multimodal settings stay behind."""
    rope = {"rope_type": "default", "rope_theta": base, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    target = tiny.target("qwen3", rope_parameters=rope)
    folder = save_drafter(tiny.drafter(target), None, target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == base and config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": base}
    again, _ = load_drafter(folder, target)
    assert torch.equal(again.rotary.inv_freq, target.model.base_model.rotary_emb.inv_freq)


def test_never_over_a_folder_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    out = tmp_path / "out"
    save_drafter(tiny.drafter(target), None, target, out)
    before = load_file(out / "model.safetensors")["fc.weight"]
    other = tiny.drafter(target, seed=5, noise=0.1)
    with pytest.raises(UserError, match=r"out exists.*--force"):
        save_drafter(other, None, target, out)
    import adaflash.export.own as own

    monkeypatch.setattr(own, "compare", lambda *a: (_ for _ in ()).throw(UserError("read back otherwise")))
    with pytest.raises(UserError, match="read back"):
        save_drafter(other, None, target, out, force=True)
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    save_drafter(other, None, target, out, force=True)
    assert not torch.equal(load_file(out / "model.safetensors")["fc.weight"], before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_config_that_reads_back_otherwise_never_appears(tmp_path: Path) -> None:
    from adaflash.export.formats import OWN

    wrong = replace(OWN, config=lambda *a: {**OWN.config(*a), "rope_theta": 77.0, "rope_parameters": None})
    target = tiny.target()
    with pytest.raises(UserError, match="computes other states"), new_folder(tmp_path / "out", force=False) as work:
        write_drafter(tiny.drafter(target, noise=0.1), None, target, work, "float32", wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 6}, "number of target layers is 4, the target has 6"),
        ({"hidden_size": 32}, "hidden size is 64, the target has 32"),
        ({"vocab_size": 120}, "vocabulary .* is 97, the target has 120"),
    ],
)
def test_wrong_pairs_name_both_models_and_the_field(changes: dict[str, int], field: str, tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), None, target, tmp_path / "out")
    other = tiny.target("qwen3", **changes)
    other.model.name_or_path = "somebody/another-model"
    with pytest.raises(UserError, match=rf"out .*somebody/another-model.*{field}"):
        load_drafter(folder, other)


def test_context_width(tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), None, target, tmp_path / "out")
    edit(folder, dflash_target_layer_ids=[0, 1, 2])
    with pytest.raises(UserError, match=r"context width .* is 128, the target has 192"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_target_layer_ids": None}, r"target_layer_ids is missing"),
        ({"dflash_target_layer_ids": [2, 0]}, r"unsorted"),
        ({"dflash_target_layer_ids": [2, 3]}, r"layers \[3\] of \[2, 3\]"),
        ({"dflash_mask_token_id": None}, r"mask_token_id is missing"),
        ({"dflash_mask_token_id": 97}, r"mask token id is 97, the target has 0 .. 96"),
        ({"dflash_mask_token_id": -1}, r"mask token id is -1"),
        ({"block_size": 7}, r"block_size is 7 at the top level and 8 in dflash_config"),
        ({"block_size": None, "dflash_block_size": None}, r"block_size is missing"),
        ({"rope_theta": 1e6}, r"two spellings .* disagree: rope_parameters gives rope_theta 10000.0"),
        ({"rope_theta": None, "rope_parameters": None}, r"no rope_theta and no rope_parameters"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"sliding-window layers"),
        ({"is_causal": True}, r"causal drafter"),
        ({"num_hidden_layers": 3}, r"Missing: layers\.2\."),
        ({"num_hidden_layers": 1}, r"Unknown: layers\.1\."),
        ({"quantization_config": {"bits": 4}}, r"quantised"),
    ],
)
def test_a_config_that_would_cost_acceptance_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), length_head(target), target, tmp_path / "out")
    edit(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target)


def test_tensors_are_strict_both_ways(tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), None, target, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.self_attn.query.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"Missing: layers.0.self_attn.q_proj.*Unknown: layers.0.self_attn.query"):
        load_drafter(folder, target)
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        load_drafter(folder, target)
    with pytest.raises(UserError, match=r"no such folder.*config\.json"):
        load_drafter(tmp_path / "nowhere", target)


def test_block_size_may_stand_in_either_place(tmp_path: Path) -> None:
    target = tiny.target()
    folder = save_drafter(tiny.drafter(target), None, target, tmp_path / "out")
    edit(folder, block_size=None)
    assert load_drafter(folder, target)[0].block_size == 8
    edit(folder, block_size=8, dflash_block_size=None)
    assert load_drafter(folder, target)[0].block_size == 8


def test_the_same_blocks_are_drafted(tmp_path: Path) -> None:
    target = tiny.target("llama", dtype=torch.float64)
    drafter, policy = tiny.drafter(target, noise=0.05), length_head(target).double()
    folder = save_drafter(drafter, policy, target, tmp_path / "out", "float32")
    again, state = load_drafter(folder, target)
    requests = [Request(prompt.tokens, 20) for prompt in tiny.prompts(3, seed=4)]
    ours = Engine(target, drafter.float().double(), all_candidates=True).generate(requests)
    theirs = Engine(target, again.double(), all_candidates=True).generate(requests)
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.blocks.candidates.tolist() == other.blocks.candidates.tolist()
    assert load_length(state, target, 8).block_size == 8
