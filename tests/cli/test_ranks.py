"""The command line on two ranks: one line of YAML chooses the strategy, checkpoints may be shards, and all else works."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import outcomes, run_ranks

from adaflash.cli import main
from adaflash.configuration import PACKAGED, expand
from adaflash.export.command import export
from adaflash.parallel.checkpoints import is_sharded
from adaflash.trainer_cli import TrainerCLI

SHARDS = (
    "--trainer.strategy=adaflash.parallel.strategy.FSDP2Strategy",
    "--trainer.strategy.save_distributed_checkpoint=true",
)


def commands(folder: str, *lines: list[str]) -> list[int]:
    """The status of each command, on this rank."""
    os.chdir(folder)
    return [main(line) for line in lines]


def test_fit_stop_resume_validate_and_export_on_two_ranks(words: list[str], tmp_path: Path, capsys: Any) -> None:
    some = [*words, "--trainer.devices", "2", "--trainer.precision", "32-true", "--model.target_options.dtype=float32"]
    sharded = ["-c", "trainer/fsdp2", "--trainer.accelerator", "cpu", *SHARDS, "--model.parallel.target", "world"]
    hybrid = ["-c", "trainer/hybrid", "--trainer.accelerator", "cpu"]
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    lines = [
        ["fit", *sharded, *some],
        ["fit", *hybrid, *some, "--ckpt_path", "last", "--trainer.max_steps", "3"],
        ["fit", *sharded, *some, "--ckpt_path", "last", "--trainer.max_steps", "4"],
        ["validate", *sharded, *some, "--ckpt_path", checkpoint],
        ["predict", *sharded, *some, "--ckpt_path", checkpoint, "--data.predict+=adaflash.data.sources.ShippedSource",
         "--data.predict.domain", "math", "--data.predict.limit", "3"],
    ]  # fmt: skip
    assert run_ranks(commands, str(tmp_path), *lines, timeout=150) == [[0] * 5] * 2
    assert is_sharded(checkpoint) and (tmp_path / "run" / "gain.json").is_file()
    rows = [(tmp_path / "run" / f"responses-{rank}.jsonl").read_text().count("\n") for rank in (0, 1)]
    assert rows == [2, 1]
    export(checkpoint=checkpoint, to="hf", output=str(tmp_path / "drafter"))
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_a_mistake_is_told_by_every_rank_in_one_message(words: list[str], tmp_path: Path) -> None:
    line = ["fit", *words, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.precision", "bf16-true"]
    for each in outcomes(commands, str(tmp_path), line, timeout=60):
        assert each.value == [2] and "bf16-mixed" in each.output and "Traceback" not in each.output, str(each)


def _build(*words: str) -> TrainerCLI:
    """Parse and build as `fit` does, without running."""
    sys.argv = ["adaflash"]
    return TrainerCLI(args=expand(words), run=False)


DOCS = (PACKAGED.parents[1] / "docs" / "scale.md").read_text()
LINES = re.findall(r"fit +(-c .*)", DOCS.replace("\\\n", " "))


@pytest.mark.parametrize("line", LINES, ids=["one node", "two nodes", "SLURM"])
def test_every_start_line_of_the_docs_builds(line: str, words: list[str]) -> None:
    flags = [word for word in line.split() if word not in ("mine.yaml", "last", "--ckpt_path")]
    flags = [word for word, after in zip(flags, [*flags[1:], ""], strict=True) if (word, after[:1]) != ("-c", "-")]
    built = _build(*flags, *words, "--trainer.accelerator", "cpu", "--trainer.devices", "2")
    assert type(built.trainer.strategy).__name__ == ("FSDP2Strategy" if "fsdp2" in line else "DDPStrategy")
    assert built.model.parallel.target == ("auto" if "fsdp2" in line else "node")


def test_the_docs_have_start_lines() -> None:
    assert len(LINES) == 3 and sum("num_nodes" in line for line in LINES) == 2
