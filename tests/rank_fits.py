"""Fits that can be compared between strategies and numbers of ranks: float64, recorded responses, batches by hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fitting
import lightning as L
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from adaflash.module import AdaFlashModule
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.types import Prompt, PromptBatch


def world() -> int:
    """How many ranks there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


def recorded(count: int, seed: int = 0, longest: int = 14) -> list[Prompt]:
    """Prompts with random responses of many lengths, some of which ended by a stop."""
    made, answers = tiny.prompts(count, seed=seed), tiny.prompts(count, longest, seed=seed + 100)
    return [
        dataclasses.replace(p, response=(1, 2, *a.tokens), finish=("stop", "length")[i % 2])
        for i, (p, a) in enumerate(zip(made, answers, strict=True))
    ]


def share(prompts: Sequence[Prompt], batches: int) -> list[PromptBatch]:
    """This rank's part of every batch: all ranks together have the same prompts in a batch, however many there are."""
    size = len(prompts) // batches
    parts = [tuple(prompts[i * size : (i + 1) * size]) for i in range(batches)]
    return [PromptBatch(p[rank() :: world()], i, 0, 1, len(p), cursor=i + 1) for i, p in enumerate(parts)]


class Batches(L.LightningDataModule):
    """Hand-made batches, in order, again and again."""

    def __init__(self, batches: Sequence[PromptBatch]) -> None:
        super().__init__()
        self.batches = list(batches)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def module(**settings: Any) -> AdaFlashModule:
    """In float64 (the first steps of Adam are signs of gradients, and the sign of one that is 0 up to rounding is
    rounding), with every anchor."""
    made = fitting.module(
        tiny.target(dtype=torch.float64), **{"rollout": RecordedRollout(), "num_anchors": 100, "clip": 0.05, **settings}
    )
    return made.double()


def fit(
    of: AdaFlashModule, folder: Path, batches: Sequence[PromptBatch], steps: int, *callbacks: Callback, **settings: Any
) -> L.Trainer:
    """Fit on all ranks; what each of them trained is kept from Lightning's own sampler."""
    settings = {"devices": world() // settings.get("num_nodes", 1), "use_distributed_sampler": False, **settings}
    trainer = fitting.trainer(Path(folder), steps, callbacks, **settings)
    trainer.fit(of, datamodule=Batches(batches))
    return trainer


class Log(Callback):
    """What every update logged: Adam and clipping hide the scale of a gradient, its logged norm does not."""

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step > len(self.updates):
            self.updates.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def full(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors, whatever they are sharded over; a collective."""
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().clone() for n, w in weights.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Same names, values within the tolerance."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_log(
    one: Sequence[dict[str, float]], other: Sequence[dict[str, float]], tolerance: float = 1e-6
) -> None:
    """Same names and values in every update."""
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
