"""Calibration by hand, over many rounds, and through a fit."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.loggers import CSVLogger

from adaflash.callbacks.length_monitor import LengthMonitor
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.calibration import CalibrationStats, calibration_error, scalars, tally
from adaflash.length.fixed import FullBlock
from adaflash.length.survival import SurvivalLength
from adaflash.types import BlockLog, Trajectory

B = 4


def trajectory(anchors: list[int], accepted: list[int], forecast: list[list[float]], end: int = 40) -> Trajectory:
    """Tokens 0, 1, 2, ...: a candidate is right if it is its own position."""
    rows = [[a + k if k <= n else 99 for k in range(1, B)] for a, n in zip(anchors, accepted, strict=True)]
    numbers = torch.tensor(accepted)
    log = BlockLog(
        torch.tensor(anchors), torch.tensor(rows), numbers * 0 + 3, numbers, numbers + 1, torch.tensor(forecast)
    )
    return Trajectory("t", "a", torch.arange(end), 3, "length", log)


def test_by_hand() -> None:
    one = trajectory([3, 10], [2, 0], [[2.1, 0.95, 0.85, 0.3], [0.4, 0.95, 0.2, 0.0]])
    survival, acceptance = tally(one, B)
    assert survival[0, 9].tolist() == pytest.approx([2, 1.9, 1])  # one of two that should nearly all survive
    assert survival[1, 8].tolist() == pytest.approx([1, 0.85, 1])
    assert survival[2, 3].tolist() == pytest.approx([1, 0.3, 0], abs=1e-6)
    assert acceptance.tolist() == pytest.approx([2, 0.5])
    assert calibration_error(survival) == pytest.approx((0.9 + 0.15 + 0.2 + 0.3 + 0.0) / 6)
    found = scalars(["a"], survival[None], acceptance[None])
    assert found["length/error"] == found["length/error/a"] == pytest.approx(0.25)
    assert found["length/calibration/1"] == pytest.approx(0.45)


def test_the_end_censors_and_unknown_candidates_do_not_count() -> None:
    late = trajectory([37], [2], [[2.0, 0.9, 0.9, 0.9]])  # positions 38 and 39; the third lies behind the end
    survival, acceptance = tally(late, B)
    assert survival[..., 0].sum(1).tolist() == [1, 1, 0]
    assert acceptance[0] == 0  # cut off by the limit
    unknown = trajectory([3], [1], [[2.0, 0.9, 0.9, 0.9]])
    unknown.blocks.candidates[0, 1] = -1
    assert tally(unknown, B)[0][..., 0].sum(1).tolist() == [1, 0, 0]
    silent = trajectory([3], [1], [[2.0, float("nan"), float("nan"), float("nan")]])
    assert not tally(silent, B)[0].any() and tally(silent, B)[1].tolist() == [1, 1]


def test_true_hazards_are_calibrated_and_bold_ones_are_not() -> None:
    rng = torch.Generator().manual_seed(0)
    stats = {name: CalibrationStats(B, ["a"]) for name in ("true", "bold")}
    for _ in range(300):
        hazards = torch.rand(8, B - 1, generator=rng)
        accepted = (torch.rand(8, B - 1, generator=rng) < hazards).long().cumprod(1).sum(1).tolist()
        for name, alive in (("true", hazards.cumprod(1)), ("bold", hazards.sqrt().cumprod(1))):
            forecast = torch.cat([alive.sum(1, keepdim=True), alive], 1).tolist()
            stats[name].update([trajectory(list(range(3, 35, 4)), accepted, forecast)])
    errors = {name: scalars(of.domains, *of.compute())["length/calibration"] for name, of in stats.items()}
    assert errors["true"] < 0.02 < 0.1 < errors["bold"]


def test_it_adds_up() -> None:
    one = trajectory([3, 10], [2, 0], [[2.1, 0.95, 0.85, 0.3], [0.4, 0.95, 0.2, 0.0]])
    whole, halves = CalibrationStats(B, ["a", "b"]), CalibrationStats(B, ["a", "b"])
    whole.update([one, replace(one, domain="b")])
    for each in (one, replace(one, domain="b")):
        halves.update([each])
    assert torch.equal(whole.compute()[0], halves.compute()[0])
    plain = replace(one, blocks=replace(one.blocks, forecast=None))
    halves.update([plain])
    assert torch.equal(whole.compute()[0], halves.compute()[0])


@pytest.mark.parametrize("policy", [SurvivalLength, AdaptiveLength, FullBlock])
def test_through_a_fit(policy: type, tmp_path: Path) -> None:
    module = fitting.module(tiny.target(), length=policy())
    data = fitting.data(tmp_path, tiny.prompts(8), tiny.prompts(3, seed=5))
    logger = CSVLogger(str(tmp_path), name="", version="")
    trainer = fitting.trainer(
        tmp_path, 2, [LengthMonitor()], logger=logger, limit_val_batches=1.0, val_check_interval=2
    )
    trainer.fit(module, datamodule=data)
    logged = trainer.logged_metrics
    assert ("val/length/error" in logged) == (policy is not FullBlock)
    assert ("val/length/calibration/a" in logged) == (policy is SurvivalLength)
    assert (tmp_path / "reliability.csv").exists() == (policy is SurvivalLength)
    if policy is SurvivalLength:
        rows = list(csv.DictReader((tmp_path / "reliability.csv").open()))
        assert {row["domain"] for row in rows} <= {"a", "b", "c"} and all(int(row["candidates"]) > 0 for row in rows)


def test_a_frozen_drafter_does_not_move_while_the_policy_learns(tmp_path: Path) -> None:
    module = fitting.module(tiny.target(), length=SurvivalLength(), freeze_drafter=True)
    before = fitting.weights(module)
    fitting.trainer(tmp_path, 3).fit(module, datamodule=fitting.data(tmp_path, tiny.prompts(8)))
    for name, tensor in fitting.weights(module).items():
        assert torch.equal(tensor, before[name]) == name.startswith("drafter."), name
