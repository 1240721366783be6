"""The NaN guard: a poisoned update moves no weight and no moment, is told by name, and too many end the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback

from adaflash.callbacks.nan_guard import NaNGuard, culprits
from adaflash.errors import UserError


class Poison(Callback):
    """Spoils one gradient at chosen updates, and keeps weights and optimizer state after every update."""

    def __init__(self, updates: set[int], value: float = torch.nan) -> None:
        self.updates, self.value, self.seen = updates, value, {}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step + 1 in self.updates:
            pl_module.drafter.norm.weight.grad[3] = self.value
            pl_module.length.head.out.bias.grad[0] = self.value

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        moments = {
            f"{i}.{name}": value.clone()
            for i, state in enumerate(trainer.optimizers[0].state.values())
            for name, value in state.items()
        }
        self.seen[trainer.global_step] = fitting.weights(pl_module) | moments


def fit(folder: Path, poison: Poison, guard: NaNGuard, steps: int = 4) -> Any:
    trainer = fitting.trainer(folder, steps, [poison, guard])
    trainer.fit(fitting.module(tiny.target()), datamodule=fitting.data(folder, tiny.prompts(8)))
    return trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_skipped_update_moves_nothing(tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    poison, guard = Poison({2, 3}, value), NaNGuard(in_a_row=3)
    trainer = fit(tmp_path, poison, guard)
    seen = poison.seen
    assert same(seen[1], seen[2]) and same(seen[2], seen[3]) and not same(seen[3], seen[4])
    assert all(tensor.isfinite().all() for tensor in seen[4].values())
    assert (guard.skipped, guard.streak) == (2, 0) and guard.state_dict() == {"skipped": 2, "streak": 0}
    assert trainer.callback_metrics["train/skipped_updates"] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    # 1e30 is finite, the norm of the tensor is not; that of the bias, one number, is.
    named = "drafter.norm.weight" if value == 1e30 else "drafter.norm.weight and 1 more"
    said = f"skipped: the gradient of {named} is not finite"
    assert lines == [f"update 2 {said} (1 so far)", f"update 3 {said} (2 so far)"]


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    poison = Poison({2, 3, 4})
    with pytest.raises(UserError, match=r"update 3: .* 2 times in a row"):
        fit(tmp_path, poison, NaNGuard(in_a_row=2))
    assert sorted(poison.seen) == [1, 2] and same(poison.seen[1], poison.seen[2])


def test_apart_they_do_not(tmp_path: Path) -> None:
    guard = NaNGuard(in_a_row=2)
    fit(tmp_path, Poison({1, 3}), guard)
    assert guard.skipped == 2


def test_a_rank_whose_gradient_is_sound_follows_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    layer: Any = torch.nn.Linear(2, 1)
    layer(torch.ones(2)).backward()
    layer.log = lambda *args, **kwargs: None
    asked: list[bool] = []

    def decide(mine: bool, all: bool) -> bool:
        asked.append(mine)
        return False

    strategy = SimpleNamespace(reduce_boolean_decision=decide)
    trainer: Any = SimpleNamespace(strategy=strategy, is_global_zero=True, global_rank=0, world_size=2, global_step=0)
    NaNGuard().on_before_optimizer_step(trainer, layer, SimpleNamespace())  # type: ignore[arg-type]
    assert asked == [True] and layer.weight.grad is None and layer.bias.grad is None
    assert "[rank: 0] update 1 skipped: the gradient of another rank is not finite" in capsys.readouterr().out


def test_names_of_the_culprits() -> None:
    layer = torch.nn.Linear(2, 1)
    assert culprits(layer) == []
    layer(torch.ones(2)).backward()
    assert culprits(layer) == []
    layer.bias.grad = torch.tensor([torch.inf])
    assert culprits(layer) == ["bias"]
    with pytest.raises(UserError, match="in_a_row is 0"):
        NaNGuard(in_a_row=0)
