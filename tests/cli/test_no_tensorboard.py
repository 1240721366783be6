"""A machine without the TensorBoard package: said once, and nothing is missing from the CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from adaflash import run_folder
from adaflash.cli import main


def test_a_notice_and_a_whole_csv(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_folder.find_spec
    monkeypatch.setattr(run_folder, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    with pytest.warns(UserWarning, match="no TensorBoard log: .*pip install tensorboard.* metrics.csv"):
        assert main(["fit", *words]) == 0
    run = tmp_path / "run"
    assert not list(run.glob("events.out.*")) and (run / "drafts.jsonl").is_file()
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name for name in rows[0] if any(row[name] for row in rows)}
    assert {
        "loss/ce", "loss/rkl", "train/tau", "val/tau", "val/tau/math", "val/acceptance/1", "val/domain_spread",
        "val/length/mean", "time/rollout", "throughput/tokens_per_second", "memory/peak_gib", "lr-AdamW/drafter",
    } <= logged  # fmt: skip
