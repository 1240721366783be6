"""What the engine and the module ask of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from adaflash.errors import UserError
from adaflash.types import Blocks, KeyValues, Segments
from adaflash.vocabulary import DraftHead, DraftVocabulary

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

    @property
    def said(self) -> DraftVocabulary | None:
        """The tokens it can say; None: all of the target's."""
        return None

    def head(self, target: HFTarget) -> DraftHead:
        """From its states to logits of what it can say: the target's own rows."""
        said, known = self.said, _HEADS.get(self)
        if said is None:
            return DraftHead(target.head)
        if known is None or known[0]() is not target or not _same(known[1], said, target):
            known = _HEADS[self] = ref(target), DraftHead(target.head_rows(said.tokens.to(target.device)), said)
        return known[1]

    def remember(self, weights: dict[str, Tensor]) -> None:
        """Called before `build` with the weights of a checkpoint, for a drafter that reads more than weights from them."""

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

    def units(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """Parts that are sharded on their own, each with the methods beside `forward` that the drafter calls."""
        return []


# Rows of the target's head are copied once, and outside of drafters, which are copied and saved.
_HEADS: WeakKeyDictionary[Drafter, tuple[ref[HFTarget], DraftHead]] = WeakKeyDictionary()


def _same(head: DraftHead, said: DraftVocabulary, target: HFTarget) -> bool:
    known = head.vocabulary
    return known is not None and known.tokens.device == target.device and torch.equal(known.tokens, said.tokens)


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
