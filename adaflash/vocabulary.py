"""What a drafter can say: all of the target's tokens, or the most frequent ones of its traffic.

A drafter with n tokens computes n rows of the target's output head instead of V. To everybody else it is a drafter whose
other logits are minus infinity. `d2t` and `t2d` are the maps as vLLM's `speculators` knows them: draft place i is token
i + d2t[i], and t2d says of every token whether it can be said.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaflash.errors import UserError


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

    def describe(self) -> str:
        """How many tokens of how many, and which: the same words for the same tokens."""
        digest = hashlib.sha256(",".join(map(str, self.tokens.tolist())).encode()).hexdigest()
        return f"{len(self.tokens)} of {len(self.place)} tokens ({digest[:8]})"

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


WHOLE = DraftHead(lambda logits: logits)
"""Of a drafter that can say everything, given its logits."""
KEY = "model.drafter.init_args.vocabulary"


def write_vocabulary(file: Path, said: DraftVocabulary, about: dict[str, Any]) -> None:
    """A vocabulary file: JSON with `vocabulary` (V), `tokens` (rising ids) and how they were counted."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": 1, "vocabulary": len(said.place), **about, "tokens": said.tokens.tolist()}
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(file)


def read_vocabulary(name: str, size: int, stop_ids: Sequence[int]) -> DraftVocabulary:
    """The tokens of a vocabulary file for a target with `size` rows and these stop tokens.

    Raises:
        UserError: no such file, not one of ours, of another target, or one without a stop token.
    """
    try:
        content = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
        tokens, theirs = content["tokens"], content["vocabulary"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{KEY}: {name} is not a vocabulary file ({type(error).__name__}: {error}); `adaflash vocabulary` writes one"
        ) from None
    if theirs != size:
        raise UserError(f"{KEY}: {name} was counted for a target with {theirs} tokens, this one has {size}")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise UserError(f"{KEY}: {name}: `tokens` must be a list of ids 0 .. {size - 1}")
    if len(set(tokens)) < 2 or (missing := sorted(set(stop_ids) - set(tokens))):
        lacks = f"the stop tokens {missing}" if len(set(tokens)) > 1 else "at least two tokens"
        raise UserError(f"{KEY}: {name} lacks {lacks}; a drafter must be able to say them. Count again for this target")
    return DraftVocabulary.of(torch.tensor(tokens, dtype=torch.int64), size)
