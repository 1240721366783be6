"""Each format: complete folders, what differs between servers, the command that serves, the command line."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from exporting import make_source, save_run, save_target
from safetensors.torch import load_file

from adaflash.cli import main
from adaflash.errors import UserError
from adaflash.export.command import export, export_drafter, said
from adaflash.export.keys import drafter_keys
from adaflash.export.manifest import read_manifest
from adaflash.export.own import load_drafter, rounded
from adaflash.export.probe import block_states, read_probe
from adaflash.length.adaptive import AdaptiveLength
from adaflash.targets.hf import HFTarget

PROMPT = (5, 9, 2, 40, 41, 7)


@pytest.mark.parametrize("to", ["sglang", "vllm", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text"])  # tied, untied, scaled embedding
def test_export_and_reload(to: Any, dtype: Any, family: str, tmp_path: Path) -> None:
    source = make_source(tiny.target(family))
    folder = tmp_path / "out"
    export_drafter(source, to, folder, dtype)
    again, head = load_drafter(folder, source.target)
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    written = {names.get(name, name): value for name, value in load_file(folder / "model.safetensors").items()}
    twin = rounded(source.drafter, source.target, written)
    for one, other in zip(
        block_states(again, source.target, PROMPT), block_states(twin, source.target, PROMPT), strict=True
    ):
        assert torch.equal(one, other)
    config = json.loads((folder / "config.json").read_text())
    assert {value.dtype for value in written.values()} == {getattr(torch, dtype)} and config["dtype"] == dtype
    inside = {f"thresh_head_two_model.{n}.{w}" for n in ("down", "res.0", "out") for w in ("weight", "bias")}
    extra = inside if to == "sglang" else {"embed_tokens.weight"} if (to, family) == ("vllm", "gemma3_text") else set()
    assert set(written) == drafter_keys(2) | extra  # embedding and head are the target's: never stored when shared
    assert set(head) == set(source.length.state_dict())
    assert (folder / "length_policy" / "model.safetensors").exists() == (to != "sglang")
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]  # servers read all they find


def test_what_servers_count_and_how_they_number_layers(tmp_path: Path) -> None:
    """SGLang counts the anchor, vLLM does not; vLLM's layer ids begin with the embedding (FAULTS 66)."""
    source = make_source(tiny.target("llama"))
    texts, configs = {}, {}
    for to in ("sglang", "vllm", "hf"):
        export_drafter(source, to, tmp_path / to)  # type: ignore[arg-type]
        texts[to] = said(source, to, tmp_path / to, "bfloat16")  # type: ignore[arg-type]
        configs[to] = json.loads((tmp_path / to / "config.json").read_text())
    sglang = shlex.split(texts["sglang"].splitlines()[-1])
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "8"
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(tmp_path / "sglang")
    vllm = shlex.split(texts["vllm"].splitlines()[-1])
    assert json.loads(vllm[-1]) == {"method": "dflash", "model": str(tmp_path / "vllm"), "num_speculative_tokens": 7}
    config = configs["vllm"]
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert configs["sglang"]["dflash_config"]["target_layer_ids"] == configs["hf"]["target_layer_ids"] == [0, 2]
    assert config["block_size"] == 8 and config["sample_from_anchor"] is False and config["mask_token_id"] == 96
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    layer = config["transformer_layer_config"]
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert config["draft_vocab_size"] == layer["vocab_size"] == tiny.VOCAB
    assert configs["hf"]["layer_types"] == ["full_attention"] * 2
    assert "thresh_head_two_model" in texts["sglang"] and "length_policy/" in texts["vllm"]


def test_families_a_server_cannot_lend_to_are_said(tmp_path: Path) -> None:
    source = make_source(tiny.target("gemma3_text"), head=False)
    export_drafter(source, "sglang", tmp_path / "a")
    text = said(source, "sglang", tmp_path / "a", "bfloat16")
    assert "no DFlash hook in its gemma3_text model" in text and "scales its embedding" in text
    export_drafter(source, "vllm", tmp_path / "b")
    rows = load_file(tmp_path / "b" / "model.safetensors")["embed_tokens.weight"].float()
    assert torch.allclose(rows, source.target.embed(torch.arange(tiny.VOCAB)), rtol=1e-2)


def test_another_policy_goes_beside_and_lends_its_paper_head(tmp_path: Path) -> None:
    """A survival head is a sidecar, never extra tensors; SGLang still gets the paper's head it was trained with."""

    class Survival(AdaptiveLength):
        def build(self, hidden_size: int, block_size: int) -> None:
            super().build(hidden_size, block_size)
            self.hazard = torch.nn.Linear(hidden_size, 1)

    source = make_source(tiny.target())
    policy = Survival()
    policy.build(64, 8)
    source = replace(source, length=policy)
    for to, inside in (("sglang", 6), ("vllm", 0), ("hf", 0)):
        export_drafter(source, to, tmp_path / to)  # type: ignore[arg-type]
        names = set(load_file(tmp_path / to / "model.safetensors"))
        assert sum(name.startswith("thresh_head_two_model.") for name in names) == inside
        beside = load_file(tmp_path / to / "length_policy" / "model.safetensors")
        assert set(load_drafter(tmp_path / to, source.target)[1]) == set(policy.state_dict()) - {
            "hazard.weight",
            "hazard.bias",
        }
        assert set(beside) == set(policy.state_dict()) and beside["hazard.weight"].dtype == torch.float32
        assert "length_policy/; this server does not read it" in said(source, to, tmp_path / to, "bfloat16")  # type: ignore[arg-type]


def test_manifest_and_probe(tmp_path: Path) -> None:
    target = HFTarget.load(save_target(tmp_path / "target"))
    source = make_source(target)
    export_drafter(source, "sglang", tmp_path / "out", "float32")
    manifest = read_manifest(tmp_path / "out")
    assert manifest["target"]["name"] == "tiny" and manifest["target"]["layers"] == 4
    assert (
        manifest["context_layers"]["ids"] == [0, 2]
        and "hidden_states[l + 1]" in manifest["context_layers"]["convention"]
    )
    assert manifest["training"] == {"checkpoint": "run/last.ckpt", "steps": 7, "best_val_tau": 2.5}
    assert manifest["block"] == {"size": 8, "candidates": 7, "anchor_predicts": False}
    assert len(manifest["template"]["sha256"]) == 64
    assert manifest["length_policy"]["class_path"] == "adaflash.length.adaptive.AdaptiveLength"
    with np.load(tmp_path / "out" / "probe.npz", allow_pickle=False) as arrays:  # readable without adaflash
        assert set(arrays.files) == {
            f"{n}_{i}" for n in ("tokens", "context", "candidates", "margins", "dtype") for i in (0, 1)
        }
    for probe in read_probe(tmp_path / "out"):
        context, states = block_states(source.drafter, target, tuple(probe.tokens[:-1].tolist()))
        assert torch.equal(context, probe.context) and bool((probe.margins >= 0).all())
        assert target.head(states[0, 1:]).argmax(-1).tolist() == probe.candidates.tolist()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From format to format by folder; errors in one message."""
    name = save_target(tmp_path / "target")
    source = make_source(HFTarget.load(name))
    export_drafter(source, "vllm", tmp_path / "theirs", "float32")
    words = ["import", "--drafter", str(tmp_path / "theirs"), "--target", name, "--output", str(tmp_path / "ours")]
    assert main([*words, "--dtype", "float32"]) == 0
    assert "context layers 0 2" in capsys.readouterr().out
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert all(torch.equal(ours[key], theirs[key]) for key in drafter_keys(2))
    assert "thresh_head_two_model.out.weight" in ours  # from the sidecar
    assert read_manifest(tmp_path / "ours")["training"]["best_val_tau"] == 2.5  # kept from the first export
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--force", "--dtype", "float32"]) == 0
    assert main([*words, "--dtype", "float32", "--force"]) == 0
    with pytest.raises(UserError, match="no such file or folder"):
        export(str(tmp_path / "nowhere"), "hf", str(tmp_path / "x"))
    with pytest.raises(UserError, match="add --target"):
        export(str(tmp_path / "ours"), "hf", str(tmp_path / "x"))


def test_export_of_a_run(tmp_path: Path) -> None:
    """A checkpoint of `adaflash fit`: weights, what it was trained on, its best tau; another target is refused."""
    name = save_target(tmp_path / "target")
    module = save_run(tmp_path / "run", name)
    export(str(tmp_path / "run"), "sglang", str(tmp_path / "out"), dtype="float32")
    manifest = read_manifest(tmp_path / "out")
    assert manifest["training"] == {
        "checkpoint": str(tmp_path / "run" / "last.ckpt"),
        "steps": 12,
        "best_val_tau": 1.75,
    }
    assert manifest["template"]["kwargs"] == {"enable_thinking": False} and manifest["target"]["name"] == name
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["fc.weight"], module.drafter.fc.weight)
    assert torch.equal(weights["thresh_head_two_model.out.bias"], module.length.head.out.bias)
    tiny.model("qwen3", num_hidden_layers=6).save_pretrained(tmp_path / "target")
    with pytest.raises(UserError, match="target_layers is 4"):
        export(str(tmp_path / "run"), "sglang", str(tmp_path / "out2"))
