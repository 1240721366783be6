"""The values that travel between rooms: frozen dataclasses, a shape per field.

Shape letters: R rows (requests), S sequence, N blocks, B block size, K = B - 1 candidates, C context width,
H hidden, V vocabulary, M flat (packed) rows. `K` never counts the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt, and the recorded response if the data has one."""

    id: str
    domain: str
    tokens: tuple[int, ...]
    response: tuple[int, ...] = ()
    finish: str = "length"  # how the recorded response ended: "stop" or "length"


@dataclass(frozen=True)
class PromptBatch:
    """What the data module yields: the prompts of one rollout, and which visit to that rollout this is."""

    prompts: tuple[Prompt, ...]
    rollout_id: int
    visit: int  # 0 .. visits - 1; the module makes the rollout at its first visit and keeps it for the others
    visits: int
    rows: int  # trajectories to train on in one visit (the batch size)
    cursor: int  # batches consumed, over all ranks alike, once this one has been trained on


@dataclass(frozen=True)
class Segments:
    """Packed rows: segment i holds `counts[i]` consecutive tokens of lane `lanes[i]` from position `starts[i]` on."""

    lanes: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def whole(cls, counts: Sequence[int]) -> Segments:
        """Sequences read from position 0, one lane each."""
        return cls(tuple(range(len(counts))), (0,) * len(counts), tuple(counts))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First packed row of each segment, and the total number of rows at the end."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return tuple(ends)

    @cached_property
    def positions(self) -> Tensor:
        """Absolute position of every packed row, int64 [M]."""
        spans = [torch.arange(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    @cached_property
    def rows(self) -> Tensor:
        """Lane of every packed row, int64 [M]."""
        return torch.repeat_interleave(torch.tensor(self.lanes, dtype=torch.int64), torch.tensor(self.counts))

    @cached_property
    def slots(self) -> Tensor:
        """Place of every packed row in its own segment, 0 .. count - 1, int64 [M]."""
        spans = [torch.arange(count) for count in self.counts]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


class KeyValues(Protocol):
    """Keys and values of the context, per layer and lane (the pool of the engine, or one training batch)."""

    def write(self, layer: int, keys: Tensor, values: Tensor, segments: Segments) -> None:
        """Store packed rows keys, values [M, heads, dim] at their lanes and positions."""

    def read(self, layer: int, lane: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions 0 .. length - 1 of one lane: two tensors [heads, length, dim]."""

    def read_all(self, layer: int, lanes: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions 0 .. length - 1 of lanes 0 .. lanes - 1: two tensors [lanes, heads, length, dim]."""


@dataclass(frozen=True)
class Features:
    """What one read of the target gives, for M packed rows."""

    context: Tensor  # [M, C] outputs of the context layers, concatenated
    hidden: Tensor  # [M, H] last hidden state after the final norm: `target.head` turns it into logits


@dataclass(frozen=True)
class BlockLog:
    """The n blocks that were really drafted for one trajectory, in order."""

    anchors: Tensor  # [n] int64, absolute position of the anchor
    candidates: Tensor  # [n, K] int64, -1 where the vocabulary row was not computed
    lengths: Tensor  # [n] L: candidates sent to be verified
    accepted: Tensor  # [n] A: candidates that survived
    committed: Tensor  # [n] c: tokens kept after the cut at a stop or limit
    forecast: Tensor | None = None  # [n, 1 + K] what the policy expected (see `LengthPolicy.forecast`), if it was asked
    states: Tensor | None = (
        None  # [sum(L + 1), H] post-norm states of anchor and window, rejected candidates too, if kept
    )

    @classmethod
    def empty(cls, candidates: int) -> BlockLog:
        """No block drafted; `candidates` is K."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none.reshape(0, candidates), none, none, none)


@dataclass(frozen=True)
class Trajectory:
    """Prompt + response, with what the target and drafter did on the way. P = prompt_length, E = len(tokens)."""

    id: str
    domain: str
    tokens: Tensor  # [E] int64; token P is the first of the response, an end marker is included
    prompt_length: int
    finish: str  # "stop", "length", "cancelled" or "error"
    blocks: BlockLog
    plain_steps: int = 0  # rounds of the target without a draft, prefill not counted
    context: Tensor | None = None  # [>= E - 2, C] rows 0, 1, ...: context states
    teacher: Tensor | None = None  # [>= E - 1 - P, H] rows P, P + 1, ...: post-norm states that teach
    error: str = ""

    @property
    def response(self) -> Tensor:
        """Response token ids [E - P]."""
        return self.tokens[self.prompt_length :]

    def row(self) -> dict[str, str | Tensor]:
        """The row of a rollout file, token ids as tensors."""
        return {
            "id": self.id,
            "domain": self.domain,
            "prompt_ids": self.tokens[: self.prompt_length],
            "response_ids": self.response,
            "finish_reason": self.finish,
            "error": self.error,
        }


@dataclass(frozen=True)
class Blocks:
    """N blocks over R trajectories, ready for the drafter. Slot 0 is the anchor; candidate k = 1 .. K."""

    rows: Tensor  # [N] which trajectory, non-decreasing
    anchors: Tensor  # [N] absolute position a
    tokens: Tensor  # [N, B] anchor token, then masks
    labels: Tensor  # [N, K] token at a + k (0 where not supervised)
    supervised: Tensor  # [N, K] bool, a contiguous prefix
    full: Tensor  # [N] bool: the block's acceptance can be labelled (not cut off by a length limit)

    def __len__(self) -> int:
        return len(self.anchors)

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on another device."""
        return Blocks(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})

    @classmethod
    def dummy(cls, block_size: int, mask_id: int) -> Blocks:
        """One block at position 1 that supervises nothing: for ranks that have nothing to learn."""
        tokens = torch.full((1, block_size), mask_id)
        labels = torch.zeros(1, block_size - 1, dtype=torch.int64)
        one = torch.ones(1, dtype=torch.int64)
        return cls(one - 1, one, tokens, labels, labels.bool(), torch.zeros(1, dtype=torch.bool))


@dataclass(frozen=True)
class Proposal:
    """A drafted round for R requests, before any vocabulary row is computed."""

    hidden: Tensor  # [R, B, H] block states after the final norm
    limits: Tensor  # [R] int64: the most candidates that can still be of use, 0 .. K
    candidates: Tensor | None = None  # [R, K] only for a policy that sets `needs_logits`
    probability: Tensor | None = None  # [R, K] probability the drafter gives its candidate, likewise
    logits: Tensor | None = None  # [R, K, n] over the n tokens the drafter can say, likewise
    anchors: Tensor | None = None  # [R] int64: position of each anchor, the number of tokens in the cache


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    id: str = ""
    domain: str = "default"
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = field(default=())
    stop: tuple[str, ...] = field(default=())  # strings that end the response; the token that completes one is kept
