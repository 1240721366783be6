"""The sharded strategy: FSDP2 on Lightning's ModelParallelStrategy, `trainer.strategy: fsdp2`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from adaflash.errors import UserError
from adaflash.parallel.checkpoints import is_sharded, optimizer_by_name, take_place

WHY_NOT_FSDP1 = (
    "trainer.strategy: FSDP1 (`fsdp`, FSDPStrategy) is not offered: in Lightning it cannot clip by norm and runs on no "
    "CPU, so that no test could compare it. Use --trainer.strategy fsdp2, or ddp"
)


class FSDP2Strategy(ModelParallelStrategy):
    """Drafter, length policy and losses that learn are sharded over all devices.

    Args:
        save_distributed_checkpoint: Every rank writes its shards into a folder, instead of one file by rank 0.
        timeout: How long a collective may take.
    """

    def __init__(self, save_distributed_checkpoint: bool = False, timeout: timedelta = timedelta(minutes=10)) -> None:
        super().__init__("auto", 1, save_distributed_checkpoint, timeout=timeout)

    def setup_environment(self) -> None:
        """All devices are one data-parallel mesh (Lightning's own choice would be one replica a node)."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Refuse a weight that would train apart on every rank, before the optimizer sees it."""
        assert self.model is not None
        check_sharded(self.model)
        super().setup(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file; or a folder of shards, which gets its name when it is complete."""
        if not self._save_distributed_checkpoint:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        path = Path(self.broadcast(filepath))
        partial = path.with_name(f".{path.name}.partial")
        self._on_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        super().save_checkpoint(checkpoint, partial, storage_options)
        self._on_first(lambda: take_place(partial, path))
        return None

    def _on_first(self, work: Callable[[], None]) -> None:
        """What rank 0 does with files while the others wait."""
        self.barrier()
        if self.global_rank == 0:
            work()
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A folder of shards, or the file of any strategy: each rank takes its part."""
        path = self.broadcast(checkpoint_path)
        if is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None and self.lightning_module is not None
        content: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        _load_raw_module_state(content["state_dict"], self.model, strict=self.lightning_module.strict_loading)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        for optimizer, saved in zip(self.optimizers, content.get("optimizer_states", []), strict=False):
            named = optimizer_by_name(saved, optimizer, self.model)
            set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return content


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2: drafter and policy sharded", override=True)


def check_sharded(module: nn.Module) -> None:
    """Raise where a trainable parameter is not shared with the other ranks.

    Its gradient would never be summed: every rank would train its own, and nothing would tell.
    """
    apart = [name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if apart:
        raise RuntimeError(
            f"{len(apart)} trainable parameters are not sharded (first: {apart[0]}): each rank would train its own. "
            "Register modules before `configure_model` ends: a plugin adds its term in `setup`"
        )


def check_strategy(strategy: Any) -> None:
    """Raise UserError for strategies under which the module would not train right: a name, or an instance."""
    if isinstance(strategy, FSDPStrategy) or (isinstance(strategy, str) and strategy in ("fsdp", "fsdp_cpu_offload")):
        raise UserError(WHY_NOT_FSDP1)
    if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, FSDP2Strategy):
        raise UserError(
            "trainer.strategy: Lightning's ModelParallelStrategy gives every device the same data unless its sizes are "
            "set; use --trainer.strategy fsdp2"
        )
    if isinstance(strategy, str) and strategy.startswith("deepspeed"):
        raise UserError("trainer.strategy: deepspeed owns optimizer and clipping, and is not offered: use fsdp2 or ddp")
