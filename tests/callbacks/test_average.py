"""Averaged weights: the exact average, who sees which weights, and a resume that goes on from the live ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from adaflash.callbacks.average import DrafterAverage
from adaflash.errors import UserError
from adaflash.losses import FunctionTerm
from adaflash.plugin import LossPlugin

DECAY = 0.5


class Scale(FunctionTerm):
    """A loss term that learns: it must be in the average, though its plugin stands behind it in the list."""

    def __init__(self) -> None:
        super().__init__(lambda student, teacher, token: student.logsumexp(-1) * 0.01, 0.1, "scale")
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, student: Any, teacher: Any, token: Any) -> Any:
        return super().forward(student, teacher, token) * self.factor


class Watch(Callback):
    """Live weights after every update, and what validation decoded with."""

    def __init__(self) -> None:
        self.live: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.live.append(fitting.weights(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.live.append(fitting.weights(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.validated.append(fitting.weights(pl_module))


def fit(folder: Path, steps: int, ckpt: Path | None = None, every: int = 100) -> tuple[Any, Watch, DrafterAverage]:
    average, watch = DrafterAverage(DECAY), Watch()
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=every, save_top_k=0)
    trainer = fitting.trainer(
        folder, steps, [average, LossPlugin(Scale()), watch, saver], enable_checkpointing=True, limit_val_batches=1,
        val_check_interval=2,
    )  # fmt: skip
    module = fitting.module(tiny.target())
    trainer.fit(module, datamodule=fitting.data(folder, tiny.prompts(8), tiny.prompts(2)), ckpt_path=ckpt)
    return module, watch, average


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-7) for name in one)


def test_the_average_is_what_is_validated_kept_and_left(tmp_path: Path) -> None:
    module, watch, average = fit(tmp_path, 4)
    wanted = watch.live[1]  # the first update starts the average
    assert "losses.2.factor" in wanted
    seen = {}
    for step, live in enumerate(watch.live[2:], start=2):
        wanted = {name: DECAY * wanted[name] + (1 - DECAY) * live[name] for name in live}
        seen[step] = wanted
    assert not close(watch.live[4], seen[4])
    assert close(watch.validated[0], seen[2]) and close(watch.validated[1], seen[4])
    assert close(fitting.weights(module), seen[4])  # what a gain table would measure
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)  # written after training had ended
    assert close(checkpoint["state_dict"], seen[4]) and close(checkpoint["current_model_state"], watch.live[4])
    assert average.averaged(module) is module and average._average_model is not None
    assert average._average_model.module.target is module.target  # shared, not copied
    assert not any("target" in name for name in checkpoint["state_dict"])


@pytest.mark.parametrize("every", [2, 100])  # a checkpoint in the middle of a run, and that of a finished one
def test_resume_goes_on_from_the_live_weights(tmp_path: Path, every: int) -> None:
    (tmp_path / "straight").mkdir()
    (tmp_path / "broken").mkdir()
    straight, watch, _ = fit(tmp_path / "straight", 4)
    fit(tmp_path / "broken", 2, every=every)
    resumed, after, _ = fit(tmp_path / "broken", 4, tmp_path / "broken" / "last.ckpt")
    assert close(after.live[-1], watch.live[-1]) and close(fitting.weights(resumed), fitting.weights(straight))


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="decay"):
        DrafterAverage(decay=1.0)
