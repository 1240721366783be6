"""What the module asks of a rollout source."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from adaflash.decoding.sampling import filtered_probabilities
from adaflash.drafters.base import Drafter
from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt, Trajectory

Law = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Players:
    """Who takes part in a rollout, and when it happens."""

    target: HFTarget
    drafter: Drafter
    policy: LengthPolicy
    updates: int  # optimizer steps done: the drafter's version
    seed: int  # of this rollout


class RolloutFailed(UserError):
    """A source cannot give trajectories now; the run ends, and what was learned before is saved."""


def sampling_law(temperature: float, top_k: int, top_p: float) -> Law | None:
    """Logits [M, V] -> the probabilities that these settings sample from; None where they are greedy."""
    if temperature == 0:
        return None
    return partial(filtered_probabilities, temperature=temperature, top_k=top_k, top_p=top_p)


class RolloutSource(ABC):
    """Turns prompts into trajectories with context and teacher states."""

    once = False  # whether its trajectories may be trained on once only

    @abstractmethod
    def collect(self, prompts: Sequence[Prompt], players: Players) -> list[Trajectory]:
        """One trajectory per prompt, in order."""

    def law(self) -> Law | None:
        """Logits [M, V] -> the probabilities its responses are sampled from; None where they are greedy."""
        return None

    def describe(self) -> str:
        """One phrase for the banner."""
        return type(self).__name__


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else (Python's own hash changes with the process)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
