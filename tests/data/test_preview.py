"""`adaflash data preview`: what is masked, supervised and dropped, with and without colour."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaflash.cli import main
from adaflash.data.preview import preview
from adaflash.data.prompts import PromptDataModule
from adaflash.data.sources import JsonlSource

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS = [{"id": "one", "messages": CHAT}, {"messages": []}, {"messages": [*CHAT, *CHAT]}, "{broken"]


@pytest.fixture
def config(write: Callable[..., str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config as for fit: parts that the command does not read are left alone."""
    monkeypatch.chdir(tmp_path)
    write(ROWS, "rows.jsonl")
    (tmp_path / "mine.yaml").write_text(
        f"target: {target}\nmodel: {{num_anchors: 3, nonsense: 1}}\ntrainer: {{max_steps: 2}}\ndata:\n  train:\n"
        "    - {class_path: adaflash.data.sources.JsonlSource, init_args: {path: rows.jsonl, responses: true}}\n"
    )
    return tmp_path / "mine.yaml"


def test_rows_as_they_are_trained_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "preview", "-c", "mine.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown  # no colour where there is no terminal
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "train: rows.jsonl, 3 rows"
    assert lines[1].startswith("rows.jsonl:1  id one  domain default  ") and lines[1].endswith("ends by stop")
    header = "<|im_start|>user\u23ceHi<|im_end|>\u23ce<|im_start|>assistant\u23ce"
    assert lines[2:4] == [f"masked      {header}", "supervised  Hello<|im_end|>"]
    assert lines[8] == f"masked      {header}Hello<|im_end|>\u23ce{header}"
    assert "dropped: 2 rows" in lines and "rows.jsonl:2: empty (messages is [])" in lines
    assert any(line.startswith("rows.jsonl:4: broken JSON") for line in lines)


def test_options_and_overlays(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data",
        "preview",
        "-c",
        "mine.yaml",
        "-c",
        "data/shipped",
        "--role",
        "val",
        "--rows",
        "1",
        "--width",
        "20",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert (
        shown.count("the answer is made while training") == 3 and "[...]" in shown and "val: shipped eval/math" in shown
    )


def test_colour_on_a_terminal(write: Callable[..., str], target: str) -> None:
    source = JsonlSource(write(ROWS, "rows.jsonl"), responses=True)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    preview(PromptDataModule(target, train=[source]), "train", 1, 200, console)
    shown = screen.getvalue()
    assert "\x1b[32mHello<|im_end|>" in shown and "\x1b[2m<|im_start|>user" in shown
    assert "\x1b[31m" in shown[shown.index("dropped") :]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data"], ""),
        (["data", "prevew"], "Did you mean data preview?"),
        (["data", "preview", "-c", "mine.yaml", "--role", "test"], "--role is train, val or predict"),
        (["data", "preview", "-c", "mine.yaml", "--role", "val"], "data.val names no source"),
        (["data", "preview", "-c", "mine.yaml", "--data.max_dropped", "0.1"], "2 of 5 rows of rows.jsonl were dropped"),
        (["data", "preview", "-c", "mine.yaml", "--data.trian", "1"], "trian"),
        (["data", "preview", "-c", "nowhere.yaml"], "no such file"),
    ],
)
def test_mistakes(config: Path, words: list[str], says: str, capsys: Any) -> None:
    status = main(words)
    out, err = capsys.readouterr()
    assert status == (2 if says else 0) and says in err, (out, err)
