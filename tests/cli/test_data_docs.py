"""docs/data.md: its YAML and its commands work as shown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaflash.cli import main
from adaflash.rollouts import server
from adaflash.types import Trajectory

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^    adaflash (.*)$", PAGE, re.M)]


@pytest.fixture
def here(words: list[str], tmp_path: Path) -> str:
    """`my-data.yaml` as shown, its files, and a target."""
    [shown] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my-data.yaml").write_text(shown)
    (tmp_path / "traffic").mkdir()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [json.dumps({"messages": chat, "id": i}) for i in range(6)]
    (tmp_path / "traffic" / "recorded.jsonl").write_text("\n".join(rows))
    (tmp_path / "traffic" / "a.jsonl.gz").write_text("\n".join(rows))  # by content, not by name
    return str(yaml.safe_load((tmp_path / "small.yaml").read_text())["target"])


def test_the_preview(here: str, capsys: Any) -> None:
    [words] = [each for each in COMMANDS if each[:2] == ["data", "preview"]]
    assert main([here if word == "PATH_OR_HUB_ID" else word for word in words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("supervised  Hello") == 2 and shown.count("supervised  (the answer is made") == 2


def test_responses_of_a_server_and_a_resume(here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is stood in for: tests/rollouts/test_server.py talks to real ones."""
    asked = []

    def answer(self: Any, prompt: Any, players: Any) -> Trajectory:
        asked.append(prompt.id)
        return server.bare(server.replace(prompt, response=(5, 6, 7, 8), finish="length"), players, 8)

    monkeypatch.setattr(server.ServerRollout, "_answer", answer)
    monkeypatch.setattr(server.ServerRollout, "_only_model", lambda self: "tiny")
    (tmp_path / "short.yaml").write_text(
        "model: {rollout: {init_args: {max_new_tokens: 8}}}\ngain: {after: validate}\n"
    )
    for words in [each for each in COMMANDS if each[0] == "fit"]:
        mine = [here if word == "PATH_OR_HUB_ID" else word for word in words]
        flags = mine.index("my-data.yaml") + 1
        small = ["-c", "data/shipped", "-c", "small.yaml"]
        assert main([*mine[:3], *small, *mine[3:flags], "-c", "short.yaml", *mine[flags:]]) == 0
        assert (tmp_path / mine[mine.index("--run") + 1] / "checkpoints" / "last.ckpt").is_file()
    assert asked
