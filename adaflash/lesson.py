"""What one micro-batch teaches: blocks at chosen anchors, the context rows they read, the target's states that teach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adaflash.blocks import build_blocks, context_rows
from adaflash.types import Blocks, Segments, Trajectory


@dataclass(frozen=True)
class Lesson:
    """N blocks over R trajectories, with all that drafter and loss read about them."""

    blocks: Blocks
    context: Tensor  # [M, C] context rows of all trajectories, packed
    segments: Segments  # which of them belong to which trajectory
    teacher: Tensor  # [T, H] the target's post-norm states, packed; each trajectory's first row is its position P
    offsets: Tensor  # [R] int64; position p of trajectory r is row offsets[r] + p of `teacher`
    names: tuple[str, ...] = ()  # [R] what the prompts are called

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        anchors: Sequence[Tensor],
        block_size: int,
        mask_id: int,
        device: torch.device,
    ) -> Lesson:
        """Blocks at the anchors given for each trajectory, which must carry its states."""
        blocks = build_blocks(trajectories, anchors, block_size, mask_id)
        segments = Segments.whole([context_rows(len(each.tokens)) for each in trajectories])
        taught = [len(each.response) - 1 for each in trajectories]
        context = [_first(each.context, n) for each, n in zip(trajectories, segments.counts, strict=True)]
        teacher = [_first(each.teacher, n) for each, n in zip(trajectories, taught, strict=True)]
        offsets = torch.tensor([0, *taught[:-1]]).cumsum(0) - torch.tensor([e.prompt_length for e in trajectories])
        return cls(
            blocks.to(device),
            torch.cat(context).to(device),
            segments,
            torch.cat(teacher).to(device),
            offsets.to(device),
            tuple(each.id for each in trajectories),
        )

    @classmethod
    def empty(cls, block_size: int, mask_id: int, context: Tensor, teacher: Tensor) -> Lesson:
        """One block that supervises nothing, over one row [1, C] and [1, H] each: for a rank with nothing to learn."""
        blocks = Blocks.dummy(block_size, mask_id).to(context.device)
        return cls(blocks, context, Segments.whole([1]), teacher, torch.zeros_like(blocks.rows))

    def silent(self) -> Lesson:
        """The same blocks, none of which supervises anything."""
        blocks = self.blocks
        return replace(self, blocks=replace(blocks, supervised=torch.zeros_like(blocks.supervised)))

    def place(self, row: int) -> str:
        """Where candidate n * K + k - 1 stands, for people."""
        block, candidate = divmod(row, self.blocks.supervised.shape[1])
        trajectory, anchor = int(self.blocks.rows[block]), int(self.blocks.anchors[block])
        return f"prompt {self.names[trajectory]!r}, anchor {anchor}, candidate {candidate + 1}"


def learnable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that hold at least one anchor: a response of two tokens or more, and no error."""
    return [each for each in trajectories if len(each.response) > 1 and not each.error]


def _first(states: Tensor | None, count: int) -> Tensor:
    assert states is not None and len(states) >= count, "a trajectory to learn from must carry its states"
    return states[:count]
