"""Anchor, slot, position and window: the one place that converts between them.

A block at anchor a holds slots 0 .. K at the absolute positions a .. a + K. Slot 0 is the anchor (a known token);
candidate k is predicted by slot k itself, labelled with the token at a + k, and taught by the target's distribution
read at position a + k - 1. A block sees context at positions strictly before a, and all of its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaflash.types import Blocks, Trajectory


def slot_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of all slots, [N, B]."""
    return anchors[:, None] + torch.arange(block_size, device=anchors.device)


def teacher_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Position whose target distribution teaches candidate k = 1 .. K, [N, K]."""
    return slot_positions(anchors, block_size)[:, :-1]


def block_tokens(anchor_tokens: Tensor, block_size: int, mask_id: int) -> Tensor:
    """Drafter input [anchor, mask * K], int64 [N, B]."""
    tokens = torch.full((len(anchor_tokens), block_size), mask_id, dtype=torch.int64, device=anchor_tokens.device)
    tokens[:, 0] = anchor_tokens
    return tokens


def anchor_range(prompt_length: int, end: int) -> range:
    """Every anchor whose first candidate is supervised: P <= a <= E - 2 (empty for a response of one token)."""
    return range(prompt_length, end - 1)


def context_rows(end: int) -> int:
    """Context rows that blocks of a trajectory of E tokens can see: positions 0 .. E - 3."""
    return max(end - 2, 0)


def build_blocks(
    trajectories: Sequence[Trajectory], anchors: Sequence[Tensor], block_size: int, mask_id: int
) -> Blocks:
    """Blocks at the given anchors (one int64 tensor per trajectory), in the order given."""
    parts = [
        _blocks_of(row, trajectory, starts, block_size, mask_id)
        for row, (trajectory, starts) in enumerate(zip(trajectories, anchors, strict=True))
    ]
    fields = ("rows", "anchors", "tokens", "labels", "supervised", "full")
    return Blocks(**{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})


def _blocks_of(row: int, trajectory: Trajectory, anchors: Tensor, block_size: int, mask_id: int) -> Blocks:
    end = len(trajectory.tokens)
    valid = anchor_range(trajectory.prompt_length, end)
    assert not len(anchors) or (valid.start <= int(anchors.min()) and int(anchors.max()) < valid.stop), (anchors, valid)
    positions = slot_positions(anchors, block_size)[:, 1:]
    supervised = positions < end
    labels = torch.where(supervised, trajectory.tokens[positions.clamp(max=end - 1)], 0)
    return Blocks(
        rows=torch.full_like(anchors, row),
        anchors=anchors,
        tokens=block_tokens(trajectory.tokens[anchors], block_size, mask_id),
        labels=labels,
        supervised=supervised,
        full=supervised.all(1) | (trajectory.finish == "stop"),
    )


def choose_anchors(trajectory: Trajectory, count: int, mix: float, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct anchors in ascending order: a share `mix` from block starts the drafter met, the rest uniform.

    Where one of the two pools has too few, the other fills up. The first anchor P is a recorded start of every live
    rollout, and always in the uniform pool.
    """
    valid = anchor_range(trajectory.prompt_length, len(trajectory.tokens))
    pool = torch.arange(valid.start, valid.stop)
    met = trajectory.blocks.anchors
    met = met[(met >= valid.start) & (met < valid.stop)].unique()
    wanted = min(round(count * mix), len(met), len(pool))
    chosen = met[torch.randperm(len(met), generator=generator)[:wanted]]
    rest = pool[~torch.isin(pool, chosen)]
    uniform = rest[torch.randperm(len(rest), generator=generator)[: count - len(chosen)]]
    return torch.cat([chosen, uniform]).sort().values


def agreeing_prefix(candidates: Tensor, labels: Tensor, allowed: Tensor) -> Tensor:
    """Length of the prefix in which candidates equal labels and are allowed, int64 [N] for inputs [N, K]."""
    return ((candidates == labels) & allowed).long().cumprod(1).sum(1)
