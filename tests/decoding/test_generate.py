"""`adaflash generate` and `load_run`: from a checkpoint to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from adaflash.cli import main
from adaflash.errors import UserError
from adaflash.run import load_run

LOSSES = [{"class_path": "adaflash.losses.TeacherCrossEntropy", "init_args": {"weight": 1.0, "name": "ce"}}]


def config(target: str) -> dict:
    return {
        "target": target,
        "drafter": {
            "class_path": "adaflash.drafters.dflash.DFlash",
            "init_args": {"num_layers": 1, "block_size": 4, "num_context_layers": 2, "context_layers": [0, 2]},
        },
        "length": {"class_path": "adaflash.length.adaptive.AdaptiveLength", "init_args": {"rate": 1.3}},
        "rollout": {"class_path": "adaflash.rollouts.live.LiveRollout"},
        "losses": LOSSES,
    }


@pytest.fixture(scope="module")
def checkpoint(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `adaflash fit` leaves behind, made by hand; a plugin's loss term is in it too."""
    from jsonargparse import ArgumentParser

    from adaflash.module import AdaFlashModule

    parser = ArgumentParser()
    parser.add_class_arguments(AdaFlashModule, "model")
    model = parser.instantiate(parser.parse_object({"model": config(str(target_folder))})).model
    model.configure_model()
    state = {**model.state_dict(), "losses.9.plugin": torch.zeros(1)}
    text = yaml.safe_dump({"model": config(str(target_folder)), "trainer": {}})
    path = tmp_path_factory.mktemp("run") / "checkpoints" / "best.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": state, "adaflash": {"made_for": model.made_for(), "provenance": {"config": text}}}, path)
    return path


def test_a_run_comes_back(checkpoint: Path) -> None:
    module = load_run(checkpoint.parent.parent)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(value, saved[name]), name
    assert not module.training


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("adaflash"), "not written by adaflash fit"),
        (lambda c: c["adaflash"].pop("provenance"), "does not hold its config"),
        (lambda c: c["adaflash"]["made_for"].update(hidden_size=128), "its hidden_size is 128"),
        (lambda c: c["adaflash"]["made_for"].update(target="other"), "its target is 'other'"),
        (lambda c: c["state_dict"].pop("drafter.fc.weight"), "model.drafter do not fit"),
        (lambda c: c["adaflash"]["provenance"].update(config="model: {drafter: {class_path: gone.Away}}"), "cannot be"),
    ],
)
def test_a_wrong_checkpoint_says_why(checkpoint: Path, tmp_path: Path, change, says: str) -> None:
    content = torch.load(checkpoint, weights_only=True)
    change(content)
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=says):
        load_run(tmp_path / "x.ckpt")


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_text("hello")
    with pytest.raises(UserError, match="not a checkpoint that can be read"):
        load_run(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="no such"):
        load_run(tmp_path / "y.ckpt")


def test_text_is_the_same_with_and_without_the_drafter(
    checkpoint: Path, target_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    ask = ["generate", "--prompt", "Hi", "--max_new_tokens", "20", "--temperature", "0.8"]
    assert main([*ask, "--target", str(target_folder)]) == 0
    plain = capsys.readouterr()
    assert main([*ask, "--checkpoint", str(checkpoint), "--compare", "true"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out and len(plain.out) > 5
    assert "tau" in drafted.err and "the same text" in drafted.err and "tokens/s" in plain.err


def test_many_prompts(checkpoint: Path, target_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Hi"}, {"id": "b", "domain": "x", "prompt_ids": list(range(50, 60))}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert main(["generate", "--prompts", str(source), "--output", str(out), "--checkpoint", str(checkpoint),
                 "--max_new_tokens", "9", "--length", "2"]) == 0  # fmt: skip
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["id"], second["id"], second["domain"]) == ("1", "b", "x")
    assert second["prompt_ids"] == rows[1]["prompt_ids"] and len(second["response_ids"]) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert first["counts"]["tokens"] == 1 + first["counts"]["committed"] + first["counts"]["plain_steps"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give either"),
        (["--prompt", "x"], "give --checkpoint"),
        (["--prompts", "x"], "--output"),
        (["--prompt", "x", "--target", "T", "--compare", "true"], "needs a drafter"),
        (["--prompts", "/no/such", "--output", "o", "--target", "T"], "no such file"),
        (["--prompt", "x", "--target", "T", "--top_p", "2"], "top_p"),
        (["--prompt", "x", "--target", "T", "--lanes", "0"], "lanes is 0"),
    ],
)
def test_refusals(words: list[str], says: str, target_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", *(str(target_folder) if word == "T" else word for word in words)]) == 2
    assert says in capsys.readouterr().err


def test_a_bad_line_is_named(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": \n')
    words = ["--prompts", str(source), "--output", str(tmp_path / "o"), "--target", str(target_folder)]
    assert main(["generate", *words]) == 2
    assert "in.jsonl:2" in capsys.readouterr().err
