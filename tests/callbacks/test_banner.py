"""The banner says what will happen, and once how long it will take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny

from adaflash.callbacks import banner
from adaflash.callbacks.banner import Banner, lines


def test_what_will_happen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tiny.prompts(8)
    module, said = fitting.module(tiny.target()), {}
    trainer = fitting.trainer(tmp_path, 4, [Banner()], val_check_interval=2)
    trainer.fit(module, datamodule=fitting.data(tmp_path, prompts, prompts[:2]))
    said = dict(lines(trainer, module))
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
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(banner, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer: Any = SimpleNamespace(global_step=0, max_steps=104, is_global_zero=True)
    teller = Banner()
    for visit in (0, 1, 2, 3, 0, 1, 2, 3):
        batch = SimpleNamespace(visit=visit, visits=4)
        teller.on_train_batch_start(trainer, None, batch, 0)  # type: ignore[arg-type]
        clock.now, trainer.global_step = clock.now + 30, trainer.global_step + 1
        teller.on_train_batch_end(trainer, None, {}, batch, 0)  # type: ignore[arg-type]
    said = capsys.readouterr().out.strip()
    assert said == "100 updates to go: about 50 min and the validations"
