"""From recorded responses to a drafter with fewer tokens, as docs/objective.md says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adaflash.cli import main


def test_counted_trained_exported_and_planned(
    words: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt_ids": [0, 5], "response_ids": [20, 21, 22, 30 + i % 3, 1], "finish_reason": "stop"} for i in range(20)
    ]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    count = ["--rows", "responses*.jsonl", "--size", "40", "--output", "words.json"]
    assert main(["vocabulary", "--target", str(target), *count]) == 0
    assert "can be said" in capsys.readouterr().out
    limit = ["--model.drafter.init_args.vocabulary", "words.json"]
    assert main(["fit", *words, *limit]) == 0
    logged = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert "vocabulary/coverage" in logged and "vocabulary/tau_bound" in logged
    (tmp_path / "words.json").rename(tmp_path / "gone.json")
    assert main(["export", "--checkpoint", "run", "--to", "vllm", "--output", "out"]) == 0
    assert load_file("out/model.safetensors")["lm_head.weight"].shape[0] == 40
    capsys.readouterr()
    assert main(["export", "--checkpoint", "run", "--to", "sglang", "--output", "no"]) == 2
    assert "knows no d2t and t2d" in capsys.readouterr().err
    assert main(["fit", *words, *limit, "--overwrite", "true"]) == 2
    assert "words.json is not a vocabulary file" in capsys.readouterr().err
    assert main(["plan", *words, *limit]) == 0
