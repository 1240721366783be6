"""A Lightning module whose steps return hand-made trajectories: the contract of the callbacks, without a target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from adaflash.types import BlockLog, Prompt, Request, Trajectory

BLOCK = 4


def trajectory(domain: str, lengths: list[int], accepted: list[int], plain: int = 0, base: int = 100) -> Trajectory:
    """Prompt of 3 tokens, then rounds that accepted what is asked for, then plain steps; all candidates known."""
    total = 4 + sum(a + 1 for a in accepted) + plain + BLOCK
    tokens = torch.arange(base, base + total)
    starts = [3]
    for a in accepted:
        starts.append(starts[-1] + a + 1)
    rows = [
        [int(tokens[s + k]) if k <= a else 0 for k in range(1, BLOCK)] for s, a in zip(starts, accepted, strict=False)
    ]
    log = BlockLog(
        torch.tensor(starts[:-1], dtype=torch.int64),
        torch.tensor(rows, dtype=torch.int64).reshape(-1, BLOCK - 1),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(accepted, dtype=torch.int64),
        torch.tensor([a + 1 for a in accepted], dtype=torch.int64),
    )
    return Trajectory("r", domain, tokens, 3, "length", log, plain)


class FakeEngine:
    """Sleeps `cost` seconds a request, and answers always the same."""

    def __init__(self, cost: float, drafts: bool) -> None:
        self.cost, self.drafts = cost, drafts
        self.policy = SimpleNamespace(describe=lambda: "FixedLength(3)")
        self.seconds: Counter[str] = Counter()

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        time.sleep(self.cost * len(requests))
        self.seconds["verify"] += self.cost * len(requests)  # type: ignore[assignment]
        lengths, accepted, plain = ([3, 3], [1, 2], 0) if self.drafts else ([], [], 5)
        return [trajectory(each.domain, lengths, accepted, plain) for each in requests]


class FakeModule(L.LightningModule):
    """Accepts one more candidate per block once it has trained: tau 1 before, `after + 1` later (math), 1 less (chat)."""

    def __init__(self, after: int = 3, rounds: int = 60, round_cost: float = 0.002) -> None:
        super().__init__()
        self.round_cost = round_cost
        self.drafter = SimpleNamespace(block_size=BLOCK)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.after, self.rounds = after, rounds

    def _decode(self) -> list[Trajectory]:
        good = self.after if self.global_step or self.trainer.ckpt_path else 0
        return [
            trajectory("math", [3] * self.rounds, [good] * self.rounds),
            trajectory("chat", [3] * self.rounds, [max(good - 1, 0)] * self.rounds, plain=2),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out: dict[str, Any] = {"loss": self.weight**2}
        return out | ({"rollout": self._decode()} if batch_idx % 2 == 0 else {})

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"trajectories": self._decode()}

    test_step = validation_step

    decoding = staticmethod(nullcontext)

    def engine(self, drafter: bool = True) -> FakeEngine:
        assert not self.training
        return FakeEngine(self.round_cost if drafter else 0.004, drafter)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FakeData(L.LightningDataModule):
    """Two batches a validation, any number for training."""

    domains = ("math", "chat")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(list(range(4)))  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        batches = [[Prompt(f"{name}{i}", name, (i, 2)) for i in range(2)] for name in self.domains]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    test_dataloader = val_dataloader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def quiet_trainer(folder: Path, callbacks: list[L.Callback], **kwargs: Any) -> L.Trainer:
    """A trainer of four steps that prints nothing and validates everything first."""
    options: dict[str, Any] = {
        "default_root_dir": folder,
        "callbacks": callbacks,
        "logger": False,
        "max_steps": 4,
        "max_epochs": -1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": -1,
    }
    return L.Trainer(**options | kwargs)
