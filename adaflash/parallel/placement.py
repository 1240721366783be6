"""Where every weight of a run lies: called by `configure_model`, the same on every rank."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from adaflash.parallel.decoding import Gathered, Lockstep, gathered, sharded_parts
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.sharded_target import load_sharded, shard_target, skeleton
from adaflash.parallel.strategy import check_strategy
from adaflash.parallel.trained import shard_drafter, spread, start_equal
from adaflash.targets.fetch import resolve
from adaflash.targets.hf import HFTarget, TargetOptions

if TYPE_CHECKING:
    from adaflash.module import AdaFlashModule


class Placement:
    """The devices of a run, and what lies on them.

    Args:
        trainer: None outside a run: everything lies on the CPU.
        mesh: Of the sharded strategy; None under all others.
        options: What the user wants.
    """

    def __init__(self, trainer: Any, mesh: DeviceMesh | None, options: ParallelOptions) -> None:
        if trainer is not None:
            check_strategy(trainer.strategy)
        self.options = options
        self.mesh = mesh["data_parallel"] if mesh is not None else None
        self.device = trainer.strategy.root_device if trainer is not None else torch.device("cpu")
        self.nodes = trainer.num_nodes if trainer is not None else 1
        self.world = trainer.world_size if trainer is not None else 1
        self.half = trainer is not None and str(trainer.precision) == "bf16-mixed"

    def load(self, name: str, options: TargetOptions) -> HFTarget:
        """The target, whole or sharded."""
        if self.world == 1:
            return HFTarget.load(name, options).to(self.device)
        place = self._place(skeleton(resolve(name), options))
        if place == "replicate":
            return HFTarget.load(name, options).to(self.device)
        return load_sharded(name, options, self._target_mesh(place), self.device)

    def readable(self, target: HFTarget, layers: int) -> AbstractContextManager[None]:
        """Inside, the final norm and the last layers of a sharded target are whole: a drafter may start from them."""
        model: Any = target.model
        roots = [model.base_model] if isinstance(model.base_model, FSDPModule) else []
        return gathered([*roots, *sharded_parts(*list(target.layers)[-layers:])], stay=False)

    def spread(self, module: AdaFlashModule) -> None:
        """Shard what this run shards, once; target, drafter and policy exist."""
        if self.options.recompute:
            recompute(module.drafter)
        if self.world == 1 and self.mesh is None:
            return
        small: list[nn.Module] = [module.length, module.losses]
        if self.mesh is not None and not isinstance(module.drafter, FSDPModule):
            module.to(self.device)
            start_equal(module)
            shard_drafter(module.drafter, self.mesh, self.half)
            for each in small:
                spread(each, self.mesh)
        self._share_target(module, small)

    def _share_target(self, module: AdaFlashModule, small: list[nn.Module]) -> None:
        target = module.target
        place = self._place(target)
        if place != "replicate" and not sharded_parts(target.model):
            shard_target(target, self._target_mesh(place))
        target.to(self.device)
        if place == "replicate":
            if self.mesh is not None:
                target.ranks = Gathered(module.drafter, small)
        elif self.options.mode(_bytes(target), self._room) == "gathered":
            target.ranks = Gathered(module.drafter, small, target)
        else:
            group = self._target_mesh(place).get_group()
            target.ranks = Lockstep(module.drafter, small, target, group)
        rank_zero_info(f"target ({_bytes(target) / 1e9:.1f} GB): {target.ranks.describe()}")

    def _place(self, target: HFTarget) -> str:
        if sharded_parts(target.model):
            return "world" if self.options.target == "auto" else self.options.target
        return self.options.place(_bytes(target), self._room, self.world // self.nodes, self.nodes)

    def _target_mesh(self, place: str) -> DeviceMesh:
        if place == "world":
            return self.mesh or self._world_mesh
        return self._nodes_mesh["device"]

    @cached_property
    def _world_mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.world,))

    @cached_property
    def _nodes_mesh(self) -> DeviceMesh:
        shape = (self.nodes, self.world // self.nodes)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("node", "device"))

    @cached_property
    def _room(self) -> int:
        """Bytes free on the fullest device of all ranks."""
        free = torch.tensor(_free(self.device), device=self.device)
        if self.world > 1:
            torch.distributed.all_reduce(free, torch.distributed.ReduceOp.MIN)
        return int(free)


def recompute(drafter: nn.Module) -> None:
    """Layers of the drafter keep no activations, and run again in the backward pass. Names of weights stay."""
    for layer in getattr(drafter, "layers", []):
        if not hasattr(layer, "_kept_forward"):
            layer._kept_forward = layer.forward
            layer.forward = _again(layer.forward)


def _again(forward: Any) -> Any:
    def again(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False)

    return again


def _bytes(target: HFTarget) -> int:
    return sum(p.numel() * p.element_size() for p in target.model.parameters())


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
