"""The progress bar: which numbers, plain lines where nobody can see a bar, a bar where somebody can."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny

from adaflash.bench.pace import Pace
from adaflash.callbacks.progress import Progress, shown
from adaflash.callbacks.throughput import Throughput
from adaflash.callbacks.validate_first import ValidateFirst

METRICS = {
    "loss/ce": 3.14159, "loss/rkl": 0.5, "train/tau": 1.234, "val/tau": 1.5, "throughput/rollout_tokens_per_second": 312.4,
    "time/rollout": 0.456, "grad_norm/drafter": 3.0,
}  # fmt: skip


def test_the_numbers_and_the_time_left() -> None:
    assert shown(METRICS) == {
        "ce": "3.142", "rkl": "0.500", "tau": "1.23", "val tau": "1.50", "tok/s": "312", "rollout": "46% of the time",
    }  # fmt: skip
    trainer: Any = SimpleNamespace(
        global_step=30, max_steps=70, accumulate_grad_batches=2, callback_metrics={"loss/ce": 2.0}
    )
    bar = Progress(every=3600)
    bar.disable()
    assert bar.line(trainer) == "update 30/70 | ce 2.000 | -:--:-- left"
    bar._pace = Pace({True: 8.0, False: 3.0}, {True: 1, False: 3})
    bar._pace.begin()
    bar.on_train_batch_end(trainer, None, {}, SimpleNamespace(visit=3, visits=4), 0)  # type: ignore[arg-type]
    assert bar.line(trainer).startswith("update 30/70 | ce 2.000 | 0:03:2")  # 80 batches: 20 x 8 s and 60 x 0.75 s


def fit(folder: Path, bar: Progress) -> None:
    trainer = fitting.trainer(
        folder,
        4,
        [bar, Throughput(), ValidateFirst()],
        enable_progress_bar=True,
        limit_val_batches=1,
        val_check_interval=4,
    )
    trainer.fit(fitting.module(tiny.target()), datamodule=fitting.data(folder, tiny.prompts(8), tiny.prompts(2)))


def test_plain_lines_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Progress(every=0))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("update", "validation"))]
    assert [line.split(" | ")[0] for line in lines] == [
        "validation at update 0", *(f"update {n}/4" for n in range(1, 5)), "validation at update 4",
    ]  # fmt: skip
    assert "| ce " in lines[1] and "tok/s" not in lines[1]  # known once the rollout is used up
    assert lines[4].endswith("0:00:00 left")


def test_only_the_last_line_when_there_is_no_time_for_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Progress(every=3600))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update")]
    assert len(lines) == 1 and lines[0].startswith("update 4/4 | ")


def test_a_bar_over_updates_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "250")
    fit(tmp_path, Progress())
    out = capsys.readouterr().out
    assert "4/4" in out and "ce: " in out and "left" in out and "update 4/4 |" not in out
