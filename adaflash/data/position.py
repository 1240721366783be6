"""Where a run stands in its stream, and what becomes of that when the data or the number of ranks has changed."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_warn


@dataclass(frozen=True)
class Position:
    """Plain values only, so that checkpoints load safely."""

    consumed: int  # batches, visits included
    world: int
    rollout_size: int
    visits: int
    seed: int
    sources: str  # fingerprints and weights of the sources, in order

    @property
    def samples(self) -> int:
        """Samples taken from the global order, a rollout that has begun counted whole."""
        return -(-self.consumed // self.visits) * self.rollout_size * self.world


def moved(saved: Position, now: Position) -> int:
    """Batches to count as consumed in the stream as it is now; warns if it is another stream than the saved one."""
    if (saved.sources, saved.seed) != (now.sources, now.seed):
        what = "data.seed" if saved.sources == now.sources else "the training sources (files, weights or order)"
        rank_zero_warn(
            f"{what} changed since the checkpoint was written: the order of samples is a new one. It goes on at "
            f"sample {saved.samples}; prompts of before may come again, others later. To keep the order, restore the data."
        )
    same = (saved.world, saved.rollout_size, saved.visits) == (now.world, now.rollout_size, now.visits)
    if same:
        return saved.consumed
    per_rollout = now.rollout_size * now.world
    rollouts = -(-saved.samples // per_rollout)
    rank_zero_warn(
        f"the checkpoint was written by {saved.world} ranks x rollout_size {saved.rollout_size} x {saved.visits} visits, this "
        f"run has {now.world} x {now.rollout_size} x {now.visits}. No prompt is repeated: the stream goes on at rollout "
        f"{rollouts}; {rollouts * per_rollout - saved.samples} prompts and the open visits of a begun rollout are left out."
    )
    return rollouts * now.visits
