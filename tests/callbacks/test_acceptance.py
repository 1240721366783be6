"""The acceptance monitor in a real, tiny fit: log, CSV, picture, resume, warning."""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fake_module import FakeData, FakeModule, quiet_trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from adaflash.bench.history import History
from adaflash.callbacks.acceptance import AcceptanceMonitor

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def trainer(folder: Path, monitor: AcceptanceMonitor | None = None, **kwargs: Any) -> L.Trainer:
    return quiet_trainer(folder, [monitor or AcceptanceMonitor()], **{"log_every_n_steps": 1} | kwargs)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "acceptance.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, L.Trainer]:
    folder = tmp_path_factory.mktemp("run")
    fit = trainer(folder, logger=[TensorBoardLogger(folder), CSVLogger(folder, "csv")], enable_checkpointing=True)
    fit.fit(FakeModule(), datamodule=FakeData())
    return folder, fit


def test_numbers_in_the_log(fitted: tuple[Path, L.Trainer]) -> None:
    metrics = {name: float(value) for name, value in fitted[1].callback_metrics.items()}
    assert metrics["val/tau"] == metrics["train/tau"] == pytest.approx(3.5)
    assert (metrics["val/tau/math"], metrics["val/tau/chat"]) == (4, 3)
    assert metrics["val/acceptance/3"] == 0.5 and metrics["val/survival/3"] == 0.5
    assert metrics["val/domain_spread"] == 0.5
    assert metrics["val/position_spread"] == pytest.approx(torch.tensor([1, 1, 0.5]).std(correction=0).item())
    assert metrics["val/tokens_per_pass"] == pytest.approx((60 * 7 + 2) / 122)
    assert {"val/tau", "train/tau"} <= set(fitted[1].progress_bar_metrics)


def test_one_row_per_validation_and_domain(fitted: tuple[Path, L.Trainer]) -> None:
    """The sanity check over all batches is the "before"; its numbers are in the log of the logger too."""
    table = rows(fitted[0])
    assert [(row["step"], row["domain"]) for row in table] == [
        (step, domain) for step in ("0", "4") for domain in ("chat", "math", "all")
    ]
    assert [row["tau"] for row in table] == ["1.0", "1.0", "1.0", "3.0", "4.0", "3.5"]
    assert table[-1]["rounds"] == "240" and table[-1]["lengths/3"] == "240" and table[-1]["lengths/0"] == "0"
    assert table[0]["acceptance/2"] == "" and table[0]["survival/2"] == "0.0"
    logged = (fitted[0] / "csv" / "version_0" / "metrics.csv").read_text()
    assert ",val/tau" in logged and ",1.0" in logged


def test_the_picture_is_drawn(fitted: tuple[Path, L.Trainer]) -> None:
    from matplotlib import image

    pixels = image.imread(fitted[0] / "acceptance.png")[..., :3]
    assert pixels.shape[0] > 200 and pixels.shape[1] > 500
    assert pixels.std() > 0.02 and (pixels < 0.9).any(axis=(0, 2)).mean() > 0.5  # ink over most of the width


def test_tensorboard_has_scalars_histogram_and_figure(fitted: tuple[Path, L.Trainer]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(fitted[0] / "lightning_logs" / "version_0")).Reload()
    tags = events.Tags()
    assert {"val/tau", "val/tau/math", "val/acceptance/1", "train/tau"} <= set(tags["scalars"])
    assert "val/length" in tags["histograms"] and "acceptance" in tags["images"]
    assert [round(event.value, 3) for event in events.Scalars("val/tau")] == [1.0, 3.5]


def test_resume_keeps_the_before_and_a_new_run_does_not(tmp_path: Path) -> None:
    first = trainer(tmp_path, enable_checkpointing=True)
    first.fit(FakeModule(), datamodule=FakeData())
    saved = tmp_path / "last.ckpt"
    first.save_checkpoint(saved)
    trainer(tmp_path, max_steps=8).fit(FakeModule(after=2), datamodule=FakeData(), ckpt_path=saved)
    before, now = History(tmp_path).first_and_latest() or pytest.fail("nothing recorded")
    assert (before.step, before.tallies["math"].numbers()["tau"]) == (0, 1)
    assert (now.step, now.tallies["math"].numbers()["tau"]) == (8, 3)
    trainer(tmp_path).validate(FakeModule(after=1), datamodule=FakeData(), ckpt_path=saved)  # another process
    before, now = History(tmp_path).first_and_latest() or pytest.fail("nothing recorded")
    assert (before.run, before.step, now.run, now.step) == (1, 0, 1, 4)
    trainer(tmp_path).fit(FakeModule(after=1), datamodule=FakeData())
    before, _ = History(tmp_path).first_and_latest() or pytest.fail("nothing recorded")
    assert (before.run, before.step) == (2, 0)


def test_a_killed_write_and_another_block_size_do_no_harm(fitted: tuple[Path, L.Trainer], tmp_path: Path) -> None:
    whole = (fitted[0] / "acceptance.csv").read_text()
    (tmp_path / "acceptance.csv").write_text(whole[:-40])
    trainer(tmp_path).validate(FakeModule(), datamodule=FakeData())
    assert [(entry.run, entry.step) for entry in History(tmp_path).read()] == [(1, 0), (2, 0)]
    (tmp_path / "acceptance.csv").write_text("run,step,other\n1,0,2\n")
    trainer(tmp_path).validate(FakeModule(), datamodule=FakeData())
    assert len(rows(tmp_path)) == 3 and (tmp_path / "acceptance.1.csv").read_text().endswith("1,0,2\n")


def test_a_partial_sanity_check_is_not_a_before(tmp_path: Path) -> None:
    trainer(tmp_path, num_sanity_val_steps=1).fit(FakeModule(), datamodule=FakeData())
    assert {row["step"] for row in rows(tmp_path)} == {"4"}


def test_the_test_stage_has_its_own_names(tmp_path: Path) -> None:
    results = trainer(tmp_path).test(FakeModule(), datamodule=FakeData(), verbose=False)
    assert results[0]["test/tau"] == 1 and {row["stage"] for row in rows(tmp_path)} == {"test"}


def test_low_tau_warns_after_training_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path).validate(FakeModule(after=0), datamodule=FakeData())
    assert "mask token" not in capsys.readouterr().err
    trainer(tmp_path).fit(FakeModule(after=0), datamodule=FakeData())
    said = capsys.readouterr().err
    assert all(
        word in said
        for word in ("tau is 1.00", "240 drafted rounds", "context layers", "mask token", "template", "dtype")
    )
    trainer(tmp_path, AcceptanceMonitor(warn_rounds=300)).fit(FakeModule(after=0), datamodule=FakeData())
    assert "mask token" not in capsys.readouterr().err


def test_without_matplotlib_one_notice_and_the_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer(tmp_path).fit(FakeModule(), datamodule=FakeData())
    assert capsys.readouterr().err.count("adaflash[report]") == 1
    assert len(rows(tmp_path)) == 6 and not (tmp_path / "acceptance.png").exists()


def test_fast_dev_run_leaves_no_files(tmp_path: Path) -> None:
    trainer(tmp_path, fast_dev_run=1).fit(FakeModule(), datamodule=FakeData())
    assert not list(tmp_path.iterdir())


def test_the_default_folder_outlives_log_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaflash.bench.folder import run_folder

    monkeypatch.chdir(tmp_path)
    assert run_folder(trainer(tmp_path / "run", logger=CSVLogger("logs"))) == tmp_path / "run"
    assert run_folder(trainer(tmp_path, logger=CSVLogger("logs"))) == Path("logs")
    assert run_folder(trainer(tmp_path, logger=CSVLogger("."))) == Path("lightning_logs/version_0")
