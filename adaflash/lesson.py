"""What one micro-batch teaches: blocks at chosen anchors, the context rows they read, the target's states that teach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adaflash.blocks import build_blocks, context_rows
from adaflash.types import BlockLog, Blocks, Segments, Trajectory


@dataclass(frozen=True)
class Lesson:
    """N blocks over R trajectories, with all that drafter and loss read about them."""

    blocks: Blocks
    context: Tensor  # [M, C] context rows of all trajectories, packed
    segments: Segments  # which of them belong to which trajectory
    teacher: Tensor  # [T, H] the target's post-norm states, packed: of trajectories, then of drafted windows
    offsets: Tensor  # [N] int64; what teaches block n at position p is row offsets[n] + p of `teacher`
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
        """Blocks at the anchors given for each trajectory, which must carry its states.

        A block that was really drafted, in a log that kept its window's states, is taught along the draft: by what the
        target says behind the drafter's own candidates, as far as they were verified. All others are taught along the
        trajectory.
        """
        blocks = build_blocks(trajectories, anchors, block_size, mask_id)
        segments = Segments.whole([context_rows(len(each.tokens)) for each in trajectories])
        taught = [len(each.response) - 1 for each in trajectories]
        context = [_first(each.context, n) for each, n in zip(trajectories, segments.counts, strict=True)]
        teacher = [_first(each.teacher, n) for each, n in zip(trajectories, taught, strict=True)]
        offsets = torch.tensor([0, *taught[:-1]]).cumsum(0) - torch.tensor([e.prompt_length for e in trajectories])
        offsets, end = offsets[blocks.rows], sum(taught)
        for row, each in enumerate(trajectories):
            if each.blocks.states is not None:
                blocks, offsets = along_drafts(blocks, offsets, row, each.blocks, end)
                teacher.append(each.blocks.states)
                end += len(each.blocks.states)
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


def along_drafts(blocks: Blocks, offsets: Tensor, row: int, log: BlockLog, end: int) -> tuple[Blocks, Tensor]:
    """Trajectory `row`'s recorded blocks read their own windows, whose states [sum(L + 1), H] begin at `end`.

    Candidates 1 .. L + 1 have a teacher there; the others are not supervised, and acceptance is labelled only where none
    was left out. Returns blocks and offsets [N] anew.
    """
    sizes = log.lengths + 1
    own = (blocks.rows[:, None] == row) & (blocks.anchors[:, None] == log.anchors)  # [N, n]
    recorded, index = own.any(1), own.long().argmax(1)
    known = torch.arange(blocks.supervised.shape[1]) < sizes[index][:, None]
    supervised = torch.where(recorded[:, None], blocks.supervised & known, blocks.supervised)
    full = blocks.full & (supervised == blocks.supervised).all(1)
    first = end + (sizes.cumsum(0) - sizes)[index]
    return replace(blocks, supervised=supervised, full=full), torch.where(recorded, first - blocks.anchors, offsets)


def _first(states: Tensor | None, count: int) -> Tensor:
    assert states is not None and len(states) >= count, "a trajectory to learn from must carry its states"
    return states[:count]
