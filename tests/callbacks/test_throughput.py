"""Throughput: exact numbers on a clock that is set by hand, and shares that add up in a real fit."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.loggers import CSVLogger

from adaflash.callbacks import throughput
from adaflash.callbacks.throughput import PARTS, Throughput
from adaflash.stopwatch import Stopwatch


def test_numbers_of_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the other did exactly the same; 3 s of the 13 s were validation."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(throughput, "peak_gib", lambda device: 1.5)
    told: dict[str, float] = {}
    monkeypatch.setattr(throughput, "log_now", lambda trainer, module, values: told.update(values))
    reduce = {"sum": lambda x: 2 * x, "max": lambda x: x}
    strategy = SimpleNamespace(reduce=lambda x, reduce_op: reduce[reduce_op](x))
    trainer: Any = SimpleNamespace(global_step=10, max_steps=99, world_size=2, strategy=strategy)
    module: Any = SimpleNamespace(watch=Stopwatch(), device=torch.device("cpu"))
    meter = Throughput()
    meter.on_train_start(trainer, module)
    trajectory = SimpleNamespace(response=range(30))
    for visit in (0, 1):
        clock.now += 5
        trainer.global_step += 1
        outputs = {"rollout": [trajectory, trajectory]} if visit == 0 else {}
        module.watch.seconds.update({"rollout": 2, "drafter": 0.5, "vocabulary": 1, "backward": 1.0})
        meter.on_validation_start(trainer, module)
        clock.now += 1.5
        meter.on_validation_end(trainer, module)
        meter.on_train_batch_end(trainer, module, outputs, SimpleNamespace(visit=visit, visits=2), visit)
        assert bool(told) is (visit == 1)
    assert told == pytest.approx({
        "throughput/tokens_per_second": 12.0,  # 2 ranks x 60 tokens in 10 s
        "throughput/rollout_tokens_per_second": 30.0,  # ... in 4 s
        "throughput/updates_per_second": 0.2, "memory/peak_gib": 1.5, "time/rollout": 0.4, "time/drafter": 0.1,
        "time/vocabulary": 0.2, "time/backward": 0.2, "time/optimizer": 0.0, "time/other": 0.1,
    })  # fmt: skip
    assert not module.watch.seconds


def test_shares_of_a_real_fit_and_every_rollout_is_logged(tmp_path: Path) -> None:
    data = fitting.data(tmp_path, tiny.prompts(8))  # 4 prompts a rollout, batches of 2, twice: 4 visits
    trainer = fitting.trainer(
        tmp_path, 10, [Throughput()], logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1000
    )
    trainer.fit(fitting.module(tiny.target()), datamodule=data)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("time/rollout")]
    assert [row["step"] for row in rows] == [
        "3",
        "7",
        "9",
    ]  # as Lightning counts, from 0; the run ends within a rollout
    for row in rows:
        shares = [float(row[f"time/{part}"]) for part in (*PARTS, "other")]
        assert sum(shares) == pytest.approx(1) and all(share > 0 for share in shares)
        whole, rollout = float(row["throughput/tokens_per_second"]), float(row["throughput/rollout_tokens_per_second"])
        assert whole / rollout == pytest.approx(shares[0])
        assert 0.01 < float(row["memory/peak_gib"]) < 64
    assert float(trainer.callback_metrics["time/rollout"]) == pytest.approx(float(rows[-1]["time/rollout"]))
