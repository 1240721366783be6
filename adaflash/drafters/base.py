"""What the engine and the module ask of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adaflash.errors import UserError
from adaflash.types import Blocks, KeyValues, Segments

if TYPE_CHECKING:
    from adaflash.targets.hf import HFTarget


class Drafter(nn.Module, ABC):
    """Turns `[anchor, mask * K]` into the hidden states of a whole block, reading the target's context.

    The constructor is cheap; `build` makes the weights once the target is known.
    """

    block_size: int
    mask_id: int
    context_layers: tuple[int, ...]

    @property
    def built(self) -> bool:
        """Whether the weights exist."""
        return any(True for _ in self.parameters())

    @abstractmethod
    def build(self, target: HFTarget, mask_token: str = "") -> None:
        """Make the weights for this target; calling it again does nothing.

        mask_token: reserved special token of the target's YAML, for tokenizers without a mask token.
        """

    @abstractmethod
    def forward(self, embeds: Tensor, blocks: Blocks, context: Tensor, segments: Segments) -> Tensor:
        """Training: hidden states [N, B, H] of blocks over whole trajectories.

        embeds [N, B, H]: embeddings of `blocks.tokens`; context [M, C]: packed context rows, one segment a trajectory.
        """

    @abstractmethod
    def ingest(self, context: Tensor, segments: Segments, pool: KeyValues) -> None:
        """Decoding: store the keys and values of newly committed context rows [M, C]."""

    @abstractmethod
    def draft(self, embeds: Tensor, anchors: Tensor, lanes: list[int], pool: KeyValues) -> Tensor:
        """Decoding: hidden states [R, B, H] of one block a lane, reading the pool before `anchors` [R]."""


def default_context_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`round(1 + i (T - 4) / (n - 1))`, half to even; one layer alone is T // 2 (DESIGN section 3.1)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def check_context_layers(layers: tuple[int, ...], num_target_layers: int, key: str) -> None:
    """Refuse ids that are repeated, unsorted or outside 0 .. T - 2 (the last layer is post-norm in Hugging Face)."""
    allowed = f"allowed are 0 .. {num_target_layers - 2} in rising order, without repeats"
    if not layers:
        raise UserError(f"{key}: no context layer given; {allowed}")
    wrong = [layer for layer in layers if not 0 <= layer <= num_target_layers - 2]
    if wrong:
        raise UserError(f"{key}: layers {wrong} of {list(layers)} do not exist or may not be used; {allowed}")
    if list(layers) != sorted(set(layers)):
        raise UserError(f"{key}: {list(layers)} is repeated or unsorted; {allowed}")


def embed_blocks(target: HFTarget, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Drafter input embeddings [N, B, H], borrowed from the target, in the drafter's number format."""
    with torch.no_grad():
        return target.embed(tokens).to(dtype)
