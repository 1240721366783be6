"""What the monitors agree on over ranks: one rank's bad gradient, everybody's tokens, each rank's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rank_fits
import torch
from lightning.pytorch.callbacks import Callback
from ranks import run_ranks

from adaflash.callbacks.nan_guard import NaNGuard
from adaflash.callbacks.rollout_log import RolloutLog
from adaflash.callbacks.throughput import PARTS, Throughput

PROMPTS, STRATEGIES = 12, ("ddp", "fsdp2")


class Poison(Callback):
    """Spoils what rank 1 alone holds of one gradient at update 2; keeps the weights after every update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 1 and rank_fits.rank() == 1:
            gradient = pl_module.drafter.fc.weight.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = torch.nan

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(rank_fits.full(dict(pl_module.named_parameters())))


def job(folder: str) -> list[dict[str, Any]]:
    """Both strategies in one process group."""
    return [fit(f"{folder}/{strategy}", strategy) for strategy in STRATEGIES]


def fit(folder: str, strategy: str) -> dict[str, Any]:
    Path(folder).mkdir(exist_ok=True)
    poison, guard, log = Poison(), NaNGuard(), rank_fits.Log()
    batches = rank_fits.share(rank_fits.recorded(PROMPTS), 3)
    callbacks = [poison, guard, Throughput(), RolloutLog(), log]
    rank_fits.fit(rank_fits.module(), Path(folder), batches, 3, *callbacks, strategy=strategy)
    return {"seen": poison.seen, "skipped": guard.skipped, "log": log.updates}


def test_two_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(job, str(tmp_path), timeout=150)
    for strategy, first, second in zip(STRATEGIES, *ranks, strict=True):
        check(tmp_path / strategy, first, second)


def check(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["skipped"] == second["skipped"] == 1
    for one, other in zip(first["seen"], second["seen"], strict=True):
        rank_fits.assert_equal(one, other, 0)
    rank_fits.assert_equal(first["seen"][0], first["seen"][1], 0)  # the bad update moved nothing
    with pytest.raises(AssertionError):
        rank_fits.assert_equal(first["seen"][1], first["seen"][2], 0)
    for one, other in zip(first["log"], second["log"], strict=True):
        names = ["throughput/tokens_per_second", *(f"time/{part}" for part in (*PARTS, "other"))]
        assert [one[name] for name in names] == [other[name] for name in names]
        assert sum(one[f"time/{part}"] for part in (*PARTS, "other")) == pytest.approx(1)
    files = [(folder / "rollouts" / f"rank-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    rows = [[json.loads(line)["id"] for line in lines] for lines in files]
    assert len(rows[0]) == len(rows[1]) == PROMPTS // 2 and len({*rows[0], *rows[1]}) == PROMPTS
