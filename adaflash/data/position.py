"""Where a run stands in its stream, and what becomes of that when the data or the number of ranks has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


@dataclass(frozen=True)
class Position:
    """Plain values only, so that checkpoints load safely."""

    consumed: int  # batches, visits included
    world: int
    rollout_size: int
    visits: int
    seed: int
    sources: str  # fingerprint of the sources in their order

    @classmethod
    def read(cls, state: Mapping[str, Any], now: Position) -> Position:
        """Saved position; what an older checkpoint does not tell is taken to be as it is now."""
        known = {key: state[key] for key in asdict(now) if key in state}
        return cls(**{**asdict(now), **known})

    @property
    def samples(self) -> int:
        """Samples taken from the global order; a rollout that has begun counts whole."""
        return -(-self.consumed // self.visits) * self.rollout_size * self.world


def moved(saved: Position, now: Position) -> int:
    """Batches to count as consumed in the stream as it is now; warns if it is not the stream of the checkpoint."""
    if (saved.sources, saved.seed) != (now.sources, now.seed):
        _warn_of_new_order(saved, now)
    if (saved.world, saved.rollout_size, saved.visits) == (now.world, now.rollout_size, now.visits):
        return saved.consumed
    per_rollout = now.rollout_size * now.world
    rollouts = -(-saved.samples // per_rollout)
    rank_zero_warn(
        f"The checkpoint is of {saved.world} ranks x rollout_size {saved.rollout_size} x {saved.visits} visits, "
        f"this run has {now.world} x {now.rollout_size} x {now.visits}. No prompt is repeated: the stream goes on at "
        f"rollout {rollouts}. Left out: {rollouts * per_rollout - saved.samples} prompts, and the open visits of a "
        "rollout that had begun."
    )
    return rollouts * now.visits


def _warn_of_new_order(saved: Position, now: Position) -> None:
    what = "data.seed" if saved.sources == now.sources else "data.train (files, their contents, weights or order)"
    rank_zero_warn(
        f"{what} changed since the checkpoint was written, so the order of samples is a new one. The stream goes on at "
        f"sample {saved.samples} of the new order: prompts from before may come again and others be passed over. To go "
        "on exactly, restore the data."
    )
