"""The banner says what will happen, and once how long it will take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny

from adaflash.bench import pace
from adaflash.callbacks import banner
from adaflash.callbacks.banner import Banner, lines


def test_what_will_happen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tiny.prompts(8)
    module, said = fitting.module(tiny.target()), {}
    trainer = fitting.trainer(tmp_path, 4, [Banner()], val_check_interval=2)
    trainer.fit(module, datamodule=fitting.data(tmp_path, prompts, prompts[:2]))
    said = dict(lines(trainer, module))
    assert said["target"].endswith(" M x float32, 4 layers, frozen")
    trained = sum(p.numel() for p in module.drafter.parameters())
    assert said["drafter"].startswith(f"{trained / 1e6:.2f} M parameters, 1 layers, blocks of 8, reads layers [0, 2]")
    assert "mask token 96" in said["drafter"] and said["policy"].startswith("AdaptiveLength(rate=1.3, minimum=1): 0.")
    assert said["train"] == "8 rows of 1 sources: a, b, c" and said["val"] == "2 rows of 1 sources: a, b"
    assert said["data"] == "4 prompts a rollout, used 2 times in batches of 2"
    assert said["steps"] == "4 updates (from 4 on), validation every 2 batches"
    assert said["runs on"] == "1 x cpu, 32-true" and said["loss"].startswith("0.8 ce + 0.2 rkl; 6 blocks")
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 updates, validation every 2 batches" in shown and "8 rows of 1 sources: a, b, c" in shown


def test_how_long_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout of 90 s and 10 s an update, used for 4: 97 updates to go, 24 of which make a rollout."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer: Any = SimpleNamespace(global_step=0, max_steps=100, is_global_zero=True, accumulate_grad_batches=1)
    teller = Banner()
    for visit in (0, 1, 2, 3, 0, 1, 2, 3):
        batch = SimpleNamespace(visit=visit, visits=4)
        teller.on_train_batch_start(trainer, None, batch, 0)  # type: ignore[arg-type]
        clock.now, trainer.global_step = clock.now + (10 if visit else 100), trainer.global_step + 1
        outputs = {} if visit else {"rollout": []}
        teller.on_train_batch_end(trainer, None, outputs, batch, 0)  # type: ignore[arg-type]
        clock.now += 1000  # a validation
    assert (
        capsys.readouterr().out.strip() == "97 updates to go: about 52 min and the validations"
    )  # 73 x 10 + 24 x 100 s


def test_pace() -> None:
    known = pace.Pace({True: 200.0, False: 30.0}, {True: 2, False: 3})
    assert known.left(0, 3, 4) == 0.0
    assert known.left(2, 1, 4) == 20.0 and known.left(3, 1, 4) == 120.0 and known.left(6, 1, 4) == 150.0
    assert known.left(7, 1, 4) == 250.0  # two batches of this rollout, then one and the start of another
    assert pace.Pace({True: 30.0, False: 0.0}, {True: 3, False: 0}).left(5, 0, 1) == 50.0  # every batch makes one
    assert pace.Pace({True: 100.0, False: 10.0}, {True: 1, False: 1}).left(9, 1, 4) is None
    assert [banner.duration(s) for s in (59, 119, 120, 7200, 200000)] == ["59 s", "119 s", "2 min", "2 h", "2 days"]
