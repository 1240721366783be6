"""Somebody's drafter, adapted to one's own traffic from the command line: fit from it, export, doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from exporting import make_source, save_target
from safetensors.torch import load_file

from adaflash.cli import main
from adaflash.export.command import export_drafter
from adaflash.targets.hf import HFTarget


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a fit that takes a second and goes on from the drafter in `theirs`, with its length head."""
    monkeypatch.chdir(tmp_path)
    target = save_target(tmp_path / "target", stop_ids=(1,))
    export_drafter(make_source(HFTarget.load(target), block_size=4), "vllm", tmp_path / "theirs", "float32")
    rows = [{"prompt": f"w{3 * i} w{i} w{2 * i + 1}"} for i in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(str(row).replace("'", '"') for row in rows) + "\n")
    source = {"class_path": "adaflash.data.sources.JsonlSource", "init_args": {"path": "rows.jsonl", "domain": "mine"}}
    config = {
        "data": {"train": [source], "val": [source], "batch_size": 1, "rollout_size": 2, "reuse": 1, "val_prompts": 1},
        "model": {"num_anchors": 4, "max_new_tokens": 6, "rollout": {"init_args": {"max_new_tokens": 8, "lanes": 2}}},
        "trainer": {"max_steps": 2, "val_check_interval": 2, "enable_progress_bar": False, "accelerator": "cpu"},
        "gain": {"max_new_tokens": 4, "prompts_per_domain": 1},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    return [
        "fit", "-c", "mine.yaml", "--target", target, "--run", "run",
        "--model.drafter.init_args.checkpoint", "theirs", "--model.length.init_args.checkpoint", "theirs",
    ]  # fmt: skip


def test_adapting_a_drafter(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--model.drafter.init_args.block_size", "4"]) == 0
    assert main(["export", "--checkpoint", "run", "--to", "sglang", "--output", "ours", "--dtype", "float32"]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    moved = (before["fc.weight"] - after["fc.weight"]).abs().max()
    assert 0 < moved < 0.05 and not torch.equal(
        before["norm.weight"], after["norm.weight"]
    )  # a little, from where it was
    assert main(["doctor", "--target", "target", "--drafter", "ours", "-c", "mine.yaml", "--decode", "false"]) in (0, 1)
    out = capsys.readouterr().out
    assert "probe: drafts" in out and "fail" not in out


def test_a_setting_that_contradicts_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The default block is 16, the drafter's is 4: said with the flag that mends it, before a step is made."""
    assert main(words) == 2
    assert "--model.drafter.init_args.block_size 4" in capsys.readouterr().err
