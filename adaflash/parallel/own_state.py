"""State that every rank has for itself, in a checkpoint that rank 0 writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """What goes into the checkpoint: this state, or that of every rank in host memory. A collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return state
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), ranks)
    return {"ranks": ranks or []}


def of_this_rank(saved: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's state of a checkpoint; None if that is of another number of ranks."""
    several = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if several else (1, 0)
    ranks = saved.get("ranks", [saved])
    return ranks[rank] if len(ranks) == world else None
