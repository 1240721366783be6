"""What the rooms of the engine share: its settings, and the news it gives."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from adaflash.decoding.verify import Verification
from adaflash.drafters.base import Drafter
from adaflash.length.base import LengthPolicy
from adaflash.targets.attention import Layout
from adaflash.targets.hf import HFTarget
from adaflash.types import Trajectory


@dataclass(frozen=True)
class Progress:
    """News of one request: tokens just committed, and the whole result once it has ended."""

    index: int
    tokens: tuple[int, ...]
    done: Trajectory | None = None


@dataclass(frozen=True)
class Settings:
    """What all streams of an engine have in common, and count together."""

    target: HFTarget
    drafter: Drafter | None
    policy: LengthPolicy
    keep_states: bool
    keep_windows: bool
    all_candidates: bool
    verification: Verification
    layout: Layout
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # wall time by part of a round
    passes: Counter[str] = field(default_factory=Counter)  # target rows verified, passes, prompt rows
    memory: dict[str, int] = field(default_factory=dict)  # bytes of the pools of the last whole stream

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the wall time of the block under a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start
