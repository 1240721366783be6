"""The command line as a user meets it: errors in one message, every shipped config builds, a printed config runs again."""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar

from adaflash.cli import main
from adaflash.configuration import PACKAGED, expand, shipped
from adaflash.trainer_cli import TrainerCLI

EXPERIMENTS = sorted(name for name in shipped() if name.startswith("experiment/"))


def build(*words: str) -> TrainerCLI:
    """Parse and build as `fit` does, without running."""
    sys.argv = ["adaflash"]
    return TrainerCLI(args=expand(words), run=False)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trainer.max_stepz", "3"], "Did you mean 'trainer.max_steps'"),
        (["--model.drafter.num_layer", "3"], "Did you mean 'num_layers'"),
        (["--model.num_anchor", "3"], "Did you mean 'model.num_anchors'"),
        (["--model.drafter.init_args.block_size", "1"], "model.drafter.init_args.block_size is 1"),
        (["--model.rollout.init_args.max_new_tokens", "1"], "model.rollout.init_args.max_new_tokens is 1"),
        (["--model.optimizer.init_args.lr", "fast"], "Expected a <class 'float'>"),
        (["--data.batch_size", "3", "--data.rollout_size", "4"], "must be a multiple of data.batch_size"),
        (["--target", "smollm9-135m"], "smollm9-135m"),
        (["--model.clip", "0"], "clip > 0"),
        (["--trainer.gradient_clip_val", "1"], "use model.clip"),
        (["--trainer.precision", "bf16-true"], "bf16-mixed"),
        (["--trainer.strategy", "fsdp"], "--trainer.strategy fsdp2"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_message(words: list[str], flags: list[str], says: str, capsys: Any) -> None:
    try:
        status = main(["fit", *words, *flags])
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr().err
    assert status == 2 and says in shown and "Traceback" not in shown, shown


def test_a_misspelt_key_in_a_file_is_found_there(words: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  drafter:\n    init_args: {num_layer: 3}\n")
    with pytest.raises(SystemExit):
        main(["fit", *words, "-c", "mine.yaml"])
    shown = capsys.readouterr().err
    assert "mine.yaml:3" in shown and "Did you mean 'num_layers'" in shown, shown


def test_no_command_and_a_wrong_one(capsys: Any) -> None:
    assert main([]) == 0 and "adaflash fit" in capsys.readouterr().out
    assert main(["ft"]) == 2 and "Did you mean 'fit'" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_builds_with_its_monitors(name: str, words: list[str]) -> None:
    cli = build(*words, "-c", name, "--target", words_target(words), "--trainer.accelerator", "cpu")
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"AcceptanceMonitor", "GainTable", "NaNGuard", "ValidateFirst", "ModelCheckpoint", "LastCheckpoint"} <= set(
        names
    )
    assert names[0] == "Signals"  # before anyone validates


@pytest.mark.parametrize(
    ("flags", "bars"),
    [
        (["--trainer.enable_progress_bar", "null"], ["Progress"]),
        (["--trainer.enable_progress_bar", "false"], []),
        (["--trainer.enable_progress_bar", "null", "--trainer.callbacks+=RichProgressBar"], ["RichProgressBar"]),
    ],
)
def test_one_progress_bar_or_none(flags: list[str], bars: list[str], words: list[str]) -> None:
    callbacks = build(*words, *flags).trainer.callbacks
    assert [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)] == bars


def words_target(words: list[str]) -> str:
    return str(yaml.safe_load(Path(words[3]).read_text())["target"])


@pytest.mark.parametrize("name", sorted(set(shipped()) - set(EXPERIMENTS) - {"base", "trainer/single_gpu"}))
def test_every_overlay_builds(name: str, words: list[str]) -> None:
    if name.startswith("data/"):
        content = yaml.safe_load((PACKAGED / f"{name}.yaml").read_text())
        assert set(content) == {"data"}
    build(*words, "-c", name, "--target", words_target(words))


@pytest.mark.parametrize("value", ["1e-4", "1.0e-4", "0.0001"])
def test_numbers_in_every_spelling(value: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text(
        f"model: {{optimizer: {{class_path: adaflash.optim.AdamWConfig, init_args: {{lr: {value}}}}}}}\n"
    )
    assert build(*words, "-c", "lr.yaml").model.optimizer_config.lr == 1e-4
    assert build(*words, "--model.optimizer.init_args.lr", value).model.optimizer_config.lr == 1e-4


def test_fit_validate_predict_and_recorded_rollouts(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["fit", *words]) == 0
    run = tmp_path / "run"
    table = capsys.readouterr().out
    assert "tau" in table and (run / "gain.json").is_file() and (run / "acceptance.png").is_file()
    with (run / "acceptance.csv").open() as file:
        seen = [(row["step"], row["domain"]) for row in csv.DictReader(file)]
    assert seen == [(step, name) for step in "02" for name in ("chat", "code", "math", "all")]
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert "model:" in checkpoint["adaflash"]["provenance"]["config"]
    assert not any("target" in key for key in checkpoint["state_dict"])
    beside = json.loads((run / "checkpoints" / "provenance.json").read_text())
    assert beside == checkpoint["adaflash"]["provenance"] and beside["seed"] == 42
    assert beside["data"]["val"][0]["name"] == "shipped eval/math.jsonl"
    # The same folder again: stopped with the remedy, or taken up, or replaced.
    assert main(["fit", *words]) == 2 and "--ckpt_path last" in capsys.readouterr().err
    assert main(["fit", *words, "--ckpt_path", "last", "--trainer.max_steps", "3"]) == 0
    first, more = ((run / name).read_text() for name in ("metrics.1.csv", "metrics.csv"))
    assert "loss/ce" in first and "loss/ce" in more and first != more
    trained = (run / "metrics.csv").read_bytes()
    assert main(["validate", *words, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]) == 0
    assert (run / "metrics.csv").read_bytes() == trained and (run / "validate" / "metrics.csv").is_file()
    assert main(["fit", *words, "--overwrite", "true"]) == 0
    assert main(["predict", *words, "--data.predict+=adaflash.data.sources.ShippedSource",
                 "--data.predict.domain", "math", "--data.predict.limit", "3"]) == 0  # fmt: skip
    rows = [json.loads(line) for line in (run / "responses.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(row["response_ids"] and row["finish_reason"] in ("stop", "length") for row in rows)
    recorded = ["-c", "experiment/dflash", "-c", "small.yaml", "--run", str(tmp_path / "second"),
                "--model.rollout", "adaflash.rollouts.recorded.RecordedRollout",
                "--data.train", json.dumps([{"class_path": "adaflash.data.sources.JsonlSource",
                                             "init_args": {"path": str(run / "responses.jsonl")}}])]  # fmt: skip
    assert main(["fit", "-c", "data/shipped", *recorded]) == 0


def test_a_printed_config_runs_again(words: list[str], tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *words, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    first = yaml.safe_load((tmp_path / "printed.yaml").read_text())
    with pytest.raises(SystemExit):
        main(["fit", "-c", "printed.yaml", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == first


PLUGINS = sorted(path.stem for path in (PACKAGED.parent / "callbacks").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", PLUGINS)
def test_every_callback_fits_two_steps_from_the_yaml_in_its_docstring(
    name: str, words: list[str], tmp_path: Path
) -> None:
    module = importlib.import_module(f"adaflash.callbacks.{name}")
    docs = [
        module.__doc__ or "",
        *(inspect.getdoc(kind) or "" for kind in vars(module).values() if inspect.isclass(kind)),
    ]
    block = next(found for doc in docs if (found := yaml_of(doc)))
    assert f"adaflash.callbacks.{name}." in block or not block.startswith("trainer:")
    (tmp_path / "plugin.yaml").write_text(block)
    assert main(["fit", *words, "-c", "plugin.yaml"]) == 0
    logged = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert "loss/ce" in logged and ("penalty" not in name or f"loss/{name}" in logged)


def yaml_of(docstring: str) -> str:
    """The indented block that begins with `trainer:`, or the line of a callback that has a key of its own."""
    found = re.search(
        r"^( *)(?:trainer:\n(?:\1 +.*\n?|\n)+|(?:acceptance|gain|nan_guard): .*\n)", docstring, re.MULTILINE
    )
    return textwrap.dedent(found.group()) if found else ""
