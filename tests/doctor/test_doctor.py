"""Each cause of silently low acceptance (ENGINE section 5), injected: loading refuses it or the doctor names it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from exporting import edit, make_source, save_run, save_target
from safetensors.torch import load_file, save_file

from adaflash.cli import main
from adaflash.doctor.command import doctor, examine
from adaflash.doctor.report import Check, exit_status
from adaflash.export.command import export_drafter
from adaflash.targets.hf import HFTarget

STOPS = (1,)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `drafter` (format sglang, float32), both well."""
    home = tmp_path_factory.mktemp("well")
    target = HFTarget.load(save_target(home / "target", stop_ids=STOPS))
    export_drafter(make_source(target), "sglang", home / "drafter", "float32")
    return home


@pytest.fixture
def home(exported: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    shutil.copytree(exported, tmp_path / "home")
    return tmp_path / "home"


def look(home: Path, data: list[Path] = [], decode: bool = False) -> list[Check]:  # noqa: B006
    return list(examine(str(home / "target"), str(home / "drafter"), "", data, "float32", "", decode))


def bad(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status in ("warn", "fail")}


def test_a_healthy_pair(home: Path) -> None:
    checks = look(home)
    assert bad(checks) == {} and exit_status(checks) == 0
    names = {check.name for check in checks}
    assert {
        "memory", "drafter", "target", "tokenizer", "stop ids", "template", "embedding", "mask token", "disk", "block",
        "context layers", "rope", "dtype", "origin", "length head", "probe: context", "probe: drafts",
    } <= names  # fmt: skip
    assert all(check.remedy for check in checks if check.status != "ok")


def forget(home: Path) -> None:
    """Without adaflash.json: a stranger's drafter with a probe."""
    (home / "drafter" / "adaflash.json").unlink()


def drafter(**changes: Any) -> Callable[[Path], None]:
    return lambda home: edit(home / "drafter", **changes)


def rename(home: Path) -> None:
    file = home / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["final_layernorm.weight"] = tensors.pop("norm.weight")
    save_file(tensors, file)


def rope(home: Path) -> None:
    edit(home / "drafter", rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def swap_norms(home: Path) -> None:
    file = home / "drafter" / "model.safetensors"
    tensors = load_file(file)
    names = ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight")
    tensors[names[0]], tensors[names[1]] = tensors[names[1]].clone(), tensors[names[0]].clone()
    save_file(tensors, file)


def other_revision(home: Path) -> None:
    model = tiny.model("qwen3", seed=9)
    model.generation_config.eos_token_id = list(STOPS)
    model.save_pretrained(home / "target")


def other_template(home: Path) -> None:
    file = home / "target" / "chat_template.jinja"
    file.write_text(file.read_text().replace("w1", "w4"))


def no_head(home: Path) -> None:
    file = home / "drafter" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("thresh")}, file)


def half(home: Path) -> None:
    file = home / "drafter" / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file)


def no_stops(home: Path) -> None:
    (home / "target" / "generation_config.json").write_text("{}")


def big_tokenizer(home: Path) -> None:
    import fitting

    fitting.tokenizer(150).save_pretrained(home / "target")


def other_tokenizer(home: Path) -> None:
    file = home / "target" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["w0"], vocab["w7"] = vocab["w7"], vocab["w0"]
    file.write_text(json.dumps(content))


def drafters_tokenizer(home: Path) -> None:
    shutil.copy(home / "target" / "tokenizer.json", home / "drafter")
    other_tokenizer(home)


FAULTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {  # fault, check, status, what it says
    "layer off by one": (drafter(dflash_target_layer_ids=[0, 1]), "context layers", "fail", r"\[0, 1\] .* \[0, 2\]"),
    "layers reordered": (drafter(dflash_target_layer_ids=[2, 0]), "drafter", "fail", "unsorted"),
    "last layer": (drafter(dflash_target_layer_ids=[0, 3]), "drafter", "fail", r"layers \[3\]"),
    "layers missing": (drafter(dflash_target_layer_ids=None), "drafter", "fail", "target_layer_ids is missing"),
    "shifted head": (drafter(architectures=["Qwen3DSparkModel"]), "drafter", "fail", "DeepSpec / DSpark.*shifted head"),
    "anchor predicts": (drafter(sample_from_anchor=True), "drafter", "fail", "samples from its anchor"),
    "block miscounted": (drafter(block_size=7, dflash_block_size=7), "block", "fail", "adaflash.json says 8"),
    "block contradicts": (drafter(block_size=7), "drafter", "fail", "7 at the top level and 8"),
    "mask id": (drafter(dflash_mask_token_id=50), "mask token", "fail", "50 in config.json, 96 in adaflash.json"),
    "mask is a stop id": (drafter(dflash_mask_token_id=1), "mask token", "warn", "is a stop id"),
    "sliding window": (drafter(layer_types=["sliding_attention"] * 2), "drafter", "fail", "sliding-window"),
    "causal": (drafter(dflash_causal=None, is_causal=True), "drafter", "fail", "causal"),
    "rope base": (rope, "rope", "warn", r"base 1000000.0, the target's is 10000.0"),
    "rope spellings": (drafter(rope_theta=1e6), "drafter", "fail", "spellings .* disagree"),
    "wrong names": (rename, "drafter", "fail", "Missing: norm.weight. Unknown: final_layernorm.weight"),
    "swapped weights": (swap_norms, "probe: drafts", "fail", "from the export's"),
    "template": (other_template, "template", "warn", "not the chat template"),
    "target revision": (other_revision, "probe: context", "fail", "another target, revision"),
    "dtype": (half, "dtype", "warn", "config.json says float32, the tensors are float16"),
    "head claimed": (no_head, "length head", "fail", "claims thresh_head_two_model"),
    "head not said": (drafter(dflash_use_thresh_head_two_model=None), "length head", "warn", "does not say so"),
    "no stop ids": (no_stops, "stop ids", "fail", "lists none"),
    "stop ids of training": (no_stops, "origin", "warn", r"stop ids were \[1\] in training"),
    "tokenizer too large": (big_tokenizer, "tokenizer", "fail", "150 tokens for 97"),
    "tokenizer of another": (other_tokenizer, "tokenizer", "fail", "splits the drafter's probe otherwise"),
    "drafter's tokenizer": (drafters_tokenizer, "tokenizer file", "fail", "differs from the target's in 2 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, home: Path) -> None:
    spoil, name, status, message = FAULTS[fault]
    spoil(home)
    checks = look(home)
    found = bad(checks)
    assert name in found, [check.line() for check in checks]
    (line,) = [check.line() for check in checks if check.name == name and check.status == status]
    assert re.search(message, line), line
    assert exit_status(checks) == (2 if any(check.status == "fail" for check in checks) else 1)


@pytest.mark.parametrize(
    ("spoil", "name", "message"),
    [
        (drafter(dflash_target_layer_ids=[0, 1]), "probe: context", "reads layer 2 where its config says 1"),
        (drafter(dflash_target_layer_ids=[1, 2]), "probe: context", "reads layer 0 where its config says 1"),
        (drafter(block_size=7, dflash_block_size=7), "probe: drafts", "6 candidates, 7 when it was exported"),
        (drafter(dflash_mask_token_id=50), "probe: drafts", "from the export's"),
        (rope, "probe: drafts", "from the export's"),
    ],
)
def test_the_probe_alone_catches_it(spoil: Callable[[Path], None], name: str, message: str, home: Path) -> None:
    """Of a drafter that says nothing of its training."""
    forget(home)
    spoil(home)
    assert message in bad(look(home))[name].found


def test_embedding_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that lends unscaled rows: the context is right, the drafts are not."""
    import adaflash.export.probe as probe

    target = HFTarget.load(save_target(tmp_path / "target", "gemma3_text", STOPS))
    export_drafter(make_source(target), "sglang", tmp_path / "drafter", "float32")
    checks = look(tmp_path)
    assert bad(checks) == {} and any(c.name == "embedding" and "scales its rows" in c.found for c in checks)
    scaled = probe.embed_blocks
    monkeypatch.setattr(probe, "embed_blocks", lambda *a: scaled(*a) / 8)
    assert set(bad(look(tmp_path))) == {"probe: drafts"}


def test_thinking_switch_and_data(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data's switches are those in force; sources are read; a misspelt switch and a bad file are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w7"}\n')
    source = {"class_path": "adaflash.data.sources.JsonlSource", "init_args": {"path": "rows.jsonl", "domain": "x"}}

    def write(**settings: Any) -> list[Path]:
        content = {"model": {"ignored": 1}, "data": {"train": [source], "val": [source], **settings}}
        (tmp_path / "data.yaml").write_text(yaml.safe_dump(content))
        return [tmp_path / "data.yaml"]

    checks = look(home, write())
    read = {check.name: check.found for check in checks if check.name.startswith("data.")}
    assert read == {"data.train": "2 prompts", "data.val": "2 prompts"}
    assert any(c.name == "thinking switch" and c.status == "note" for c in checks)
    found = bad(look(home, write(template_kwargs={"enable_thinking": False})))
    assert "render otherwise" in found["template"].found and "thinking" in found["template"].found
    found = bad(look(home, write(template_kwargs={"thinkingmode": False})))
    assert "never mentions 'thinkingmode'" in found["template switch"].found
    (tmp_path / "rows.jsonl").unlink()
    assert bad(look(home, write()))["data.train"].status == "fail"
    assert "bogus" in bad(look(home, write(bogus=1)))["data"].found


def test_wrong_target_is_one_line(home: Path, tmp_path: Path) -> None:
    save_target(home / "target", stop_ids=STOPS, num_hidden_layers=6)
    assert "number of target layers is 4, the target has 6" in bad(look(home))["drafter"].found
    (checks,) = [list(examine(str(tmp_path / "none"), "", "", [], "float32", "", False))]
    assert exit_status(checks) == 2 and "does not exist" in checks[-1].found


def test_low_acceptance_is_said(home: Path) -> None:
    """A random drafter: nothing is wrong but that it does not help."""
    found = bad(look(home, decode=True))
    assert set(found) <= {"acceptance"}
    assert "acceptance" not in found or "context layers, mask token" in found["acceptance"].remedy


def test_command_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--target", str(home / "target"), "--drafter", str(home / "drafter"), "--decode", "false"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:6] in ("ok    ", "note  ") for line in lines) and len(lines) > 15
    edit(home / "drafter", dtype="float16", torch_dtype="float16")
    assert main([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_status"] == 1
    (check,) = [each for each in report["checks"] if each["status"] == "warn"]
    assert check["name"] == "dtype" and check["remedy"]
    assert main(["doctor"]) == 2
    assert "--target NAME" in capsys.readouterr().err


def test_a_check_that_breaks_does_not_hide_the_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import adaflash.doctor.target as target_checks

    monkeypatch.setattr(target_checks, "check_stops", lambda patient: 1 / 0)
    checks = look(home)
    assert bad(checks)["stop ids"].found.startswith("the check itself failed: ZeroDivisionError")
    assert any(check.name == "probe: drafts" for check in checks)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", save_target(tmp_path / "target", stop_ids=STOPS))
    assert doctor(checkpoint=str(tmp_path / "run"), decode=False) == 0
    out = capsys.readouterr().out
    assert "a run of adaflash" in out and "AdaptiveLength" in out and torch.__version__ not in out
