"""How long the rest of a training will take, from few batches: those that make a rollout cost much, the others little."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

ENOUGH = 3  # batches of a kind, before anything is foretold


@dataclass
class Pace:
    """Mean time of the batches that make a rollout and of those that only use one. Validations lie between batches."""

    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})  # fresh -> total
    batches: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _began: float = 0.0

    def begin(self) -> None:
        """A batch begins."""
        self._began = time.monotonic()

    def end(self, fresh: bool) -> None:
        """It has ended; `fresh`: it made a rollout."""
        self.seconds[fresh] += time.monotonic() - self._began
        self.batches[fresh] += 1

    def left(self, batches: int, visit: int, visits: int) -> float | None:
        """Seconds for so many batches after the one that was visit `visit` of `visits`; None: too early to say."""
        rollouts = -(-max(batches - (visits - 1 - visit), 0) // visits)
        needed = {True: rollouts, False: batches - rollouts}
        total = 0.0
        for fresh, count in needed.items():
            known = self.batches[fresh]
            if count and (not known or sum(self.batches.values()) < ENOUGH):
                return None
            total += count * self.seconds[fresh] / max(known, 1)
        return total
