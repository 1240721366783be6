"""`adaflash plan` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaflash.cli import main
from adaflash.plan.advice import HEADROOM, advise
from adaflash.plan.command import bytes_of, parse
from adaflash.plan.estimate import PHASES, estimate
from adaflash.plan.layout import share


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON of a plan, the only thing on standard output."""
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_table_and_the_json_say_the_same(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words, "--memory", "1GiB"]) == 0
    table = capsys.readouterr().out
    assert "target weights" in table and "Fits:" in table and "supervised candidates" in table
    found = planned(capsys, *words, "--memory", "1GiB")
    assert found["fits"] is True and found["changes"] == []
    for phase in PHASES:
        assert found["totals"][phase] == sum(part.get(phase, 0) for part in found["parts"].values())
    assert found["peak"] == max(found["totals"].values()) == found["totals"][found["worst_phase"]]
    # 1 trajectory x 4 blocks x 3 candidates; 2 updates of 1 trajectory that is used once
    assert found["counts"]["candidates_per_update"] == 12 and found["counts"]["prompts"] == 2


def test_weights_are_never_read(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = yaml.safe_load((tmp_path / "small.yaml").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((Path(given["target"]) / "config.json").read_text())
    assert planned(capsys, *words, "--target", str(bare))["parts"] == planned(capsys, *words)["parts"]


def test_what_does_not_fit_says_what_to_change(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    many = [*words, "--model.num_anchors", "64", "--model.rollout.init_args.max_new_tokens", "128"]
    many += ["--data.batch_size", "2", "--data.rollout_size", "2", "--data.max_prompt_tokens", "32"]
    job, _, _ = parse(many)
    memory = round(estimate(job).peak / HEADROOM * 0.7)
    changes = advise(job, memory)
    assert changes and all(change.peak <= memory * HEADROOM for change in changes)
    assert any(change.flags.startswith("--model.num_anchors ") for change in changes)
    for change in changes[:1]:  # the flags are what was planned: given to the command they give the same
        assert estimate(parse([*many, *change.flags.split()])[0]).peak == change.peak
    assert main(["plan", *many, "--memory", str(memory)]) == 0
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown and changes[0].flags in shown
    assert advise(job, 10**12) == []
    assert advise(job, 10**6) == []


def test_sharding_divides_what_is_sharded(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, *words)
    ddp = planned(capsys, *words, "--trainer.strategy", "ddp", "--devices", "4", "--nodes", "2")
    assert ddp["counts"]["candidates_per_update"] == 8 * one["counts"]["candidates_per_update"]
    assert ddp["parts"]["drafter weights"]["step"] == one["parts"]["drafter weights"]["step"]
    assert ddp["parts"]["gradient buckets"]["step"] == one["parts"]["gradients"]["step"]


def test_shares_of_rows_are_rounded_up() -> None:
    import torch

    assert share([torch.zeros(10, 3)], 4) == 3 * 3 * 4  # the first ranks hold 3 of 10 rows
    assert share([torch.zeros(10, 3), torch.zeros(())], 1) == 124


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("80gb", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--memory", "much"], "--memory 'much' is no size"),
        (["--trainer.devices", "auto", "--trainer.accelerator", "gpu"], "--devices N"),
        (["--target", "nowhere-9b/"], "nowhere-9b"),
        (["--model.drafter.init_args.context_layers", "[0,9]"], "context_layers"),
        (["--model.num_anchor", "3"], "Did you mean 'model.num_anchors'"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", *words, *flags])
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr().err
    assert status == 2 and says in shown and "Traceback" not in shown, shown
