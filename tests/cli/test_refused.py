"""What people really send by mistake: one message, exit status 2, and nothing that lay there is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from adaflash.cli import main


def told(words: list[str], capsys: Any) -> str:
    """What `fit` says on its way out with 2."""
    try:
        status = main(["fit", *words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr().err
    assert status == 2, shown  # what goes wrong in the depths would be raised
    return shown


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("data.num_workers", "-1", "data.num_workers must be at least 0"),
        ("model.lanes", "0", "model.lanes must be at least 1, got 0"),
        ("model.max_new_tokens", "-3", "model.max_new_tokens must be at least 1, got -3"),
        ("model.chunk_rows", "0", "model.chunk_rows must be at least 1, got 0"),
        ("model.rollout.init_args.lanes", "0", "model.rollout.init_args.lanes is 0"),
        ("trainer.precision", "64-true", "Use 32-true"),
        ("trainer.accumulate_grad_batches", "0", "trainer.accumulate_grad_batches must be at least 1, got 0"),
        ("trainer.val_check_interval", "0", "trainer.val_check_interval must be at least 1, got 0"),
        ("trainer.overfit_batches", "1", "trainer.overfit_batches is not offered"),
        ("trainer.devices", "0", "trainer: `Trainer(devices='0')` value is not a valid input"),
        ("model.losses", "[]", "model.losses is empty"),
        ("ckpt_path", ".", "a folder; name a checkpoint in it"),
        ("ckpt_path", "memory://nowhere/a.ckpt", "--ckpt_path memory://nowhere/a.ckpt: it cannot be read"),
        ("run", "small.yaml", "--run small.yaml: no folder that can be written to"),
    ],
)
def test_a_setting(words: list[str], key: str, value: str, says: str, capsys: Any) -> None:
    assert says in told([*words, f"--{key}", value], capsys)


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        (["adaflash.callbacks.nan_guard.NaNGuard"], "set it by its own key, as in `nan_guard: {...}`"),
        (["adaflash.callbacks.acceptance.AcceptanceMonitor"], "as in `acceptance: {...}`"),
        (["adaflash.callbacks.average.DrafterAverage"] * 2, "DrafterAverage stands there more than once"),
    ],
)
def test_a_callback_that_is_there_twice(
    words: list[str], tmp_path: Path, callbacks: list[str], says: str, capsys: Any
) -> None:
    listed = [{"class_path": name} for name in callbacks]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": listed}}))
    assert says in told([*words, "-c", "mine.yaml"], capsys)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_file.Mine", "No module named 'no_such_file'"),
        ("wants_more.Mine", "No module named 'not_installed'"),
        ("half_written.Mine", "(half_written.py, line 1)"),
        ("refuses.Mine", "not on a Monday"),
        ("refuses.Other", "does not correspond to a subclass of Callback"),
    ],
)
def test_a_callback_that_cannot_be_made(words: list[str], tmp_path: Path, name: str, why: str, capsys: Any) -> None:
    (tmp_path / "wants_more.py").write_text("import not_installed\n")
    (tmp_path / "half_written.py").write_text("class Mine(:\n")
    (tmp_path / "refuses.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Mine(Callback):\n"
        "    def __init__(self):\n        raise RuntimeError('not on a Monday')\n\n\nclass Other:\n    pass\n"
    )
    shown = told([*words, f"--trainer.callbacks+={name}"], capsys)
    assert why in shown and "Union" not in shown and "object at 0x" not in shown, shown


@pytest.mark.parametrize("weight", [".nan", ".inf", "-.inf"])
def test_a_weight_of_a_loss(words: list[str], tmp_path: Path, weight: str, capsys: Any) -> None:
    term = f"{{class_path: adaflash.losses.ReverseKL, init_args: {{weight: {weight}, name: mine}}}}"
    (tmp_path / "mine.yaml").write_text(f"model: {{losses: [{term}]}}\n")
    assert "weight of the loss term mine must be a finite number" in told([*words, "-c", "mine.yaml"], capsys)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run but TensorBoard's, which opens one a start."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "tfevents" not in path.name and path.name not in ("config.yaml", "hparams.yaml")
    }


def test_a_mistake_costs_no_run(words: list[str], tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    assert main(["fit", *words, "--trainer.logger", "true"]) == 0
    kept = content(run)
    assert {"metrics.csv", "acceptance.csv", "gain.json", "checkpoints/last.ckpt"} <= set(kept)
    (tmp_path / "empty.jsonl").write_text("")
    source = "[{class_path: adaflash.data.sources.JsonlSource, init_args: {path: empty.jsonl}}]"
    (tmp_path / "empty.yaml").write_text(f"data: {{train: {source}}}\n")
    told([*words, "--overwrite", "true", "--model.num_anchors", "0"], capsys)
    told([*words, "--overwrite", "true", "-c", "empty.yaml"], capsys)  # found when the data is read, not before
    told([*words, "--ckpt_path", "last", "--model.drafter.init_args.num_layers", "2"], capsys)
    told([*words, "--ckpt_path", "last", "--trainer.precision", "64-true"], capsys)
    assert content(run) == kept
    assert main(["fit", *words, "--ckpt_path", "last", "--trainer.max_steps", "3"]) == 0
    assert (run / "metrics.1.csv").read_bytes() == kept["metrics.csv"]  # a resume that is one keeps it beside its own
    (run / "drafts.jsonl").write_text("of the run before\n")
    assert main(["fit", *words, "--overwrite", "true"]) == 0
    assert not (run / "metrics.1.csv").exists() and "of the run before" not in (run / "drafts.jsonl").read_text()
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
