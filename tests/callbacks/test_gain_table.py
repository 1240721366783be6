"""The table at the end of a tiny fit and of validate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from fake_module import FakeData, FakeModule, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.gain_table import GainTable


def trainer(folder: Path, *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    return quiet_trainer(folder, [*callbacks, GainTable(max_new_tokens=8)], **kwargs)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_fit_ends_with_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = FakeModule()
    trainer(tmp_path, AcceptanceMonitor()).fit(module, datamodule=FakeData())
    text = capsys.readouterr().out
    for part in ("1.00 -> 4.00 (+3.00)", "1.00 -> 3.00 (+2.00)", "step 0 -> 4", "FixedLength(3)", "2/2", "4/4", "gain"):
        assert part in text, part
    assert "no gain" not in text
    data = json.loads((tmp_path / "gain.json").read_text())
    assert [row["domain"] for row in data["domains"]] == ["chat", "math", "all"]
    assert data["domains"][-1]["ratio"] == pytest.approx(2, rel=0.5)
    assert module.training  # left as it was found


def test_validate_says_no_gain_and_what_it_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as slow at tau 2.5: it would take about 5, more than a block of 4 gives."""
    trainer(tmp_path, AcceptanceMonitor()).validate(FakeModule(round_cost=0.008), datamodule=FakeData(), verbose=False)
    text = capsys.readouterr().out
    assert "no gain at tau 2.50" in text and "breaks even at tau" in text and "more than a block of 4" in text
    assert text.count("Drafter against plain decoding") == 1


def test_without_a_monitor_tau_is_the_measured_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path).validate(FakeModule(), datamodule=FakeData(), verbose=False)
    text = capsys.readouterr().out
    assert "- -> 2.50" in text and "no validation recorded" in text


def test_a_failure_is_raised_after_the_last_checkpoint(tmp_path: Path) -> None:
    class Broken(FakeModule):
        def engine(self, drafter: bool = True) -> Any:
            raise RuntimeError("no engine")

    last = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    fit = trainer(tmp_path, AcceptanceMonitor(), last, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no engine"):
        fit.fit(Broken(), datamodule=FakeData())
    assert (tmp_path / "last.ckpt").exists() and not (tmp_path / "gain.json").exists()


def test_fast_dev_run_and_data_without_prompts_measure_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class NoPrompts(FakeData):
        def val_dataloader(self) -> Any:
            return []

    trainer(tmp_path, fast_dev_run=1).fit(FakeModule(), datamodule=FakeData())
    trainer(tmp_path, limit_val_batches=0).fit(FakeModule(), datamodule=NoPrompts())
    assert "Drafter against" not in capsys.readouterr().out and not (tmp_path / "gain.json").exists()


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0; allowed are 1 and more"):
        GainTable(rounds=0)
