"""What training costs: tokens and updates a second, where the time goes, memory.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.throughput.Throughput
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from adaflash.bench.log import log_now

PARTS = ("rollout", "drafter", "vocabulary", "backward", "optimizer")


class Throughput(Callback):
    """Logs, whenever a rollout has been used up, what it and its updates took. Validation and checkpoints do not count.

    - `throughput/tokens_per_second`: response tokens of the rollout, over all ranks, per second of training
    - `throughput/rollout_tokens_per_second`: the same per second of rollout
    - `throughput/updates_per_second`
    - `time/rollout`, `time/drafter`, `time/vocabulary`, `time/backward`, `time/optimizer`, `time/other`: shares of the
      time, mean over ranks; they add up to 1. `drafter` and `vocabulary` are the forward passes; the closed-form terms
      have their gradient there already, so that `backward` is that of the drafter. `other` is loading and logging.
    - `memory/peak_gib`: of the device, or of the process on a CPU; the largest of the ranks

    Args:
        synchronize: Wait for the accelerator at both ends of every part. The split is exact then, and training slower;
            without it the accelerator's time is counted where the host waits for it, mostly in `optimizer`.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self._began = self._away = 0.0  # clock when this rollout began, seconds of validation since
        self._left: float | None = None  # clock when validation began
        self._updates = self._tokens = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin with an empty watch."""
        if self.synchronize and pl_module.device.type != "cpu":
            pl_module.watch.wait = torch.accelerator.synchronize
        self._restart(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Validation is no training."""
        self._left = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Training goes on."""
        if self._left is not None:
            self._away += time.perf_counter() - self._left
        self._left = None

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        """Time the backward pass."""
        pl_module.watch.start("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        """It has ended."""
        pl_module.watch.stop("backward")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """From here to the end of the batch: normalisation, clipping, the optimizer."""
        pl_module.watch.start("optimizer")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log at the last visit to a rollout, or of the run: that comes on all ranks at once."""
        pl_module.watch.stop("optimizer")
        for each in outputs.get("rollout", ()):
            self._tokens += len(each.response)
        if batch.visit + 1 < batch.visits and trainer.global_step != trainer.max_steps:
            return
        log_now(trainer, pl_module, self._numbers(trainer, pl_module))
        self._restart(trainer, pl_module)

    def _numbers(self, trainer: L.Trainer, pl_module: Any) -> dict[str, float]:
        wall = max(time.perf_counter() - self._began - self._away, 1e-9)
        seconds = [pl_module.watch.seconds[part] for part in PARTS]
        shares = [each / wall for each in seconds]
        mine = torch.tensor(
            [self._tokens, wall, *shares, 1 - sum(shares)], dtype=torch.float64, device=pl_module.device
        )
        peak = torch.tensor(peak_gib(pl_module.device), device=pl_module.device)
        total, peak = trainer.strategy.reduce(mine, reduce_op="sum"), trainer.strategy.reduce(peak, reduce_op="max")
        tokens, walls, *split = total.tolist()
        ranks = trainer.world_size
        numbers = {
            "throughput/tokens_per_second": tokens / (walls / ranks),
            "throughput/updates_per_second": (trainer.global_step - self._updates) / (walls / ranks),
            "memory/peak_gib": float(peak),
            **{f"time/{part}": share / ranks for part, share in zip((*PARTS, "other"), split, strict=True)},
        }
        if split[0] > 0:
            numbers["throughput/rollout_tokens_per_second"] = numbers["throughput/tokens_per_second"] * ranks / split[0]
        return numbers

    def _restart(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.watch.seconds.clear()
        self._began, self._away, self._updates, self._tokens = time.perf_counter(), 0.0, trainer.global_step, 0


def peak_gib(device: torch.device) -> float:
    """Most memory held so far: by the device's allocator, or by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
