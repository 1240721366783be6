"""What a drafter can say: all of the target's tokens, or the most frequent ones of its traffic.

A drafter with n tokens computes n rows of the target's output head instead of V. To everybody else it is a drafter whose
other logits are minus infinity. `d2t` and `t2d` are the maps as vLLM's `speculators` knows them: draft place i is token
i + d2t[i], and t2d says of every token whether it can be said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """n of a target's V tokens, in rising order."""

    tokens: Tensor  # [n] int64
    place: Tensor  # [V] int64: place of a token in `tokens`, -1 for one that cannot be said

    @classmethod
    def of(cls, tokens: Tensor, size: int) -> DraftVocabulary:
        """These tokens of a vocabulary of `size`."""
        tokens = tokens.unique()
        place = torch.full((size,), -1, dtype=torch.int64, device=tokens.device)
        place[tokens] = torch.arange(len(tokens), device=tokens.device)
        return cls(tokens, place)

    @classmethod
    def from_maps(cls, d2t: Tensor, t2d: Tensor) -> DraftVocabulary:
        """From the maps [n] and [V] of a checkpoint."""
        return cls.of(d2t + torch.arange(len(d2t), device=d2t.device), len(t2d))

    def maps(self) -> dict[str, Tensor]:
        """d2t [n] int64 and t2d [V] bool."""
        offsets = self.tokens - torch.arange(len(self.tokens), device=self.tokens.device)
        return {"d2t": offsets, "t2d": self.place >= 0}

    def widen(self, logits: Tensor) -> Tensor:
        """Logits [..., n] as [..., V], minus infinity where nothing can be said; differentiable."""
        wide = logits.new_full((*logits.shape[:-1], len(self.place)), float("-inf"))
        return wide.index_copy(-1, self.tokens, logits)

    def bounds(self, labels: Tensor, supervised: Tensor, full: Tensor) -> dict[str, Tensor]:
        """What it costs at most, as pairs (numerator, denominator) for the log.

        The share of tokens [N, K] that can be said, and the largest tau of the blocks that are labelled in `full` [N]:
        one more than the candidates before the first token that cannot be said.
        """
        inside = (self.place[labels] >= 0) & supervised
        most = (1 + inside.long().cumprod(1).sum(1)) * full
        return {
            "vocabulary/coverage": torch.stack([inside.sum(), supervised.sum()]),
            "vocabulary/tau_bound": torch.stack([most.sum(), full.sum()]),
        }


@dataclass(frozen=True)
class DraftHead:
    """The drafter's way from states [..., H] to logits [..., n], and from their places to tokens."""

    rows: Callable[[Tensor], Tensor]
    vocabulary: DraftVocabulary | None = None  # None: all of the target's tokens, n = V

    def __call__(self, states: Tensor) -> Tensor:
        """Logits of what can be said."""
        return self.rows(states)

    def ids(self, places: Tensor) -> Tensor:
        """Token ids of places in those logits, of any shape."""
        return places if self.vocabulary is None else self.vocabulary.tokens[places]

    def places(self, ids: Tensor) -> Tensor:
        """The other way; -1 for a token that cannot be said."""
        return ids if self.vocabulary is None else self.vocabulary.place[ids]

    def widen(self, logits: Tensor) -> Tensor:
        """Logits over the target's whole vocabulary."""
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)
