"""The progress bar: which numbers, plain lines where nobody can see a bar, a bar where somebody can."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny

from adaflash.callbacks import progress
from adaflash.callbacks.progress import Progress, shown
from adaflash.callbacks.throughput import Throughput
from adaflash.callbacks.validate_first import ValidateFirst

METRICS = {
    "loss/ce": 3.14159, "loss/rkl": 0.5, "train/tau": 1.234, "val/tau": 1.5, "throughput/tokens_per_second": 312.4,
    "time/rollout": 0.456, "grad_norm/drafter": 3.0,
}  # fmt: skip


def test_the_numbers_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(METRICS) == {
        "ce": "3.142", "rkl": "0.500", "tau": "1.23", "val tau": "1.50", "tok/s": "312", "rollout": "46% of the time",
    }  # fmt: skip
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer: Any = SimpleNamespace(global_step=10, max_steps=70, callback_metrics={"loss/ce": 2.0})
    bar = Progress(every=3600)
    bar.disable()
    bar._plain, bar._clock, bar._first, bar._said = True, 100.0, 10, 100.0  # resumed at update 10
    bar._away = 20.0  # seconds of what follows are validation
    clock.now, trainer.global_step = 180.0, 29
    bar.on_train_batch_end(trainer, None, {}, SimpleNamespace(visit=2, visits=4), 0)  # type: ignore[arg-type]
    assert bar.remaining(trainer) == "-:--:--"  # no rollout has been used up
    trainer.global_step = 30
    bar.on_train_batch_end(trainer, None, {}, SimpleNamespace(visit=3, visits=4), 0)  # type: ignore[arg-type]
    assert bar.line(trainer) == "update 30/70 | ce 2.000 | 0:02:00 left"  # 60 s for 20 updates, 40 to go
    trainer.global_step = 70
    assert bar.remaining(trainer) == "0:00:00"


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
