"""What is trained, over the ranks of one mesh.

The drafter, large and called layer by layer, is sharded by FSDP2. Length policies and losses that learn are small, and
may call their weights from any method of theirs: they become plain DTensors, and `whole` puts gathered tensors in their
place for as long as they are needed, so that another person's policy or loss need not know of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from adaflash.drafters.base import Drafter
from adaflash.linear import keep_unpacked


def start_equal(module: nn.Module) -> None:
    """Every rank starts from the weights of rank 0, whatever its own random numbers were."""
    with torch.no_grad():
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.data, 0)


def shard_drafter(drafter: Drafter, mesh: DeviceMesh, half: bool) -> None:
    """Layers on their own, the rest as one; fp32 masters, bf16 on the wire and in arithmetic if `half`.

    The gathered layers stay until their backward pass: a layer is called twice in a forward pass (keys of the context,
    then the block), and a drafter is small beside its target.
    """
    # Keys of the context are views. The warning is of writing into such an output in place, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    keep_unpacked(drafter)
    for unit, methods in drafter.units():
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for name in methods:
            register_fsdp_forward_method(unit, name)
    fully_shard(drafter, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for name in ("ingest", "draft"):
        register_fsdp_forward_method(drafter, name)


def spread(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters as DTensors over the mesh: cut along their first axis, or copies where it is too short."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            place = Shard(0) if parameter.ndim and parameter.shape[0] >= mesh.size() else Replicate()
            spread_out = distribute_tensor(parameter.data, mesh, [place])
            owner.register_parameter(name, nn.Parameter(spread_out, requires_grad=parameter.requires_grad))


@contextmanager
def whole(*modules: nn.Module) -> Iterator[None]:
    """Inside, spread parameters are gathered plain tensors; their gradient is the mean over ranks, as in DDP.

    One collective a parameter on entry, and one in the backward pass: every rank must enter equally often.
    """
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for owner in {id(each): each for module in modules for each in module.modules()}.values():
            if isinstance(owner, FSDPModule):
                continue
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    swapped.append((owner, name, parameter))
                    owner._parameters[name] = _gathered(parameter)  # type: ignore[assignment]
        yield
    finally:
        for owner, name, parameter in swapped:
            owner._parameters[name] = parameter


def _gathered(parameter: DTensor) -> Tensor:
    full = parameter.full_tensor(grad_placements=[Partial()])
    return _MeanGradient.apply(full, parameter.device_mesh.size())


class _MeanGradient(torch.autograd.Function):
    """The tensor itself; the sum of gradients over ranks becomes their mean."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
