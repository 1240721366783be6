"""What the README shows runs as shown: the plugin, the data file, and the commands."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from adaflash.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str, holding: str) -> str:
    """The fenced block of a language that holds a text."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if holding in text]
    assert len(found) == 1, f"{len(found)} {language} blocks of the README hold {holding!r}"
    return found[0]


def commands(starting: str) -> list[str]:
    """The indented commands of the README that start with some words."""
    return [line.strip() for line in README.splitlines() if line.startswith(f"    {starting}")]


def test_the_loss_plugin_as_written(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loss.py").write_text(block("python", "class TotalVariation"))
    [flag] = [
        word for line in commands("adaflash fit") for word in line.split() if word.startswith("--trainer.callbacks+=")
    ]
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["fit", *words, flag]) == 0
    assert "loss/my_tv" in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]


def test_the_data_file_as_written(words: list[str], tmp_path: Path) -> None:
    text = block("yaml", "traffic/support")
    (tmp_path / "my-data.yaml").write_text(text)
    (tmp_path / "traffic").mkdir()
    rows = [{"messages": [{"role": "user", "content": f"Question {i}?"}], "domain": "support"} for i in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(tmp_path / "traffic" / "support-1.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "traffic" / "code.jsonl").write_text(lines.replace("Question", "Function"))
    (tmp_path / "traffic" / "held-out.jsonl").write_text(lines.replace("Question", "Problem"))
    assert main(["fit", *words[2:], "-c", "my-data.yaml"]) == 0
    assert "support" in (tmp_path / "run" / "acceptance.csv").read_text()


def test_fit_then_validate_then_generate(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(yaml.safe_load((tmp_path / "small.yaml").read_text())["target"])
    # `adaflash fit -c experiment/adaflash --target PATH -c my-data.yaml --run runs/mine`, on a small scale
    assert main(["fit", "-c", "experiment/adaflash", *words, "--target", target, "--run", "runs/mine"]) == 0
    last = "runs/mine/checkpoints/last.ckpt"
    assert main(["validate", *words, "--target", target, "--run", "runs/mine", "--ckpt_path", last]) == 0
    capsys.readouterr()
    assert main(["generate", "--checkpoint", last, "--prompt", "Hello", "--max_new_tokens", "5"]) == 0
    assert "tau" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words_of", [line for line in commands("adaflash") if line.endswith(("--help", "--print_config"))]
)
def test_help_and_print_config(words_of: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words_of.split()[1:])
    assert (stop.value.code == 0 and "block_size" in capsys.readouterr().out) or "--help" in words_of


def test_presets_of_the_table_exist() -> None:
    from adaflash.configuration import find

    for name in re.findall(r"\| `(experiment/\w+)`", README):
        assert find(name).is_file()
