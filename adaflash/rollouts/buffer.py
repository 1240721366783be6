"""The rollout that training batches are taken from: made at its first visit, kept until its last."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

from adaflash.errors import UserError
from adaflash.rollouts.base import Players, RolloutSource, seed_of
from adaflash.types import BlockLog, PromptBatch, Trajectory


@dataclass(frozen=True)
class Reuse:
    """How long a rollout may be used, and how it is saved in the midst of its visits.

    Args:
        max_age: A rollout that is more updates old than this is made again, from the same prompts by the drafter of
            then; 0: it lasts for all the visits that `data.reuse` gives it.
        checkpoint: "tensors" keeps an unfinished rollout in the checkpoint. "boundary" keeps none and puts regular
            saves off to the end of a rollout, for targets whose states would be many times the drafter.
    """

    max_age: int = 0
    checkpoint: Literal["tensors", "boundary"] = "tensors"

    def __post_init__(self) -> None:
        if self.max_age < 0:
            raise UserError(f"model.reuse.max_age must be at least 0 (0: no limit), got {self.max_age}")


class RolloutBuffer:
    """Trajectories of one rollout, keyed by its id; its order of visits depends on the seed and the id alone."""

    def __init__(self, reuse: Reuse = Reuse()) -> None:
        self.reuse = reuse
        self.rollout_id = -1
        self.visits_left = 0
        self.born = 0  # optimizer steps done when it was made
        self.age = 0  # optimizer steps done since then, at the latest visit
        self.trajectories: list[Trajectory] = []

    def take(self, batch: PromptBatch, source: RolloutSource, players: Players) -> tuple[list[Trajectory], bool]:
        """The trajectories of this visit, and whether the rollout was made for it."""
        if source.once and batch.visits * batch.rows > len(batch.prompts):
            raise UserError(
                f"model.rollout: {source.describe()} can be trained on once, but data.reuse gives {batch.visits} visits of "
                f"{batch.rows} to {len(batch.prompts)} trajectories; set data.reuse: 1"
            )
        fresh = self._is_new(batch) or self._is_stale(players.updates)
        if fresh:
            # the states go before others come: there is room for one rollout
            self.trajectories, self.visits_left = [], 0
            # a rollout that is made again samples with noise of its own
            seed = seed_of(players.seed, batch.visit) if batch.visit else players.seed
            with players.target.ranks.decoding():
                self.trajectories = source.collect(batch.prompts, replace(players, seed=seed))
            self.rollout_id, self.born = batch.rollout_id, players.updates
        self.age, self.visits_left = players.updates - self.born, batch.visits - batch.visit - 1
        return [self.trajectories[i] for i in self._rows(batch, players.seed)], fresh

    @property
    def at_boundary(self) -> bool:
        """Whether the rollout is used up: a checkpoint needs none of its tensors."""
        return self.visits_left == 0

    def _is_new(self, batch: PromptBatch) -> bool:
        # A first visit is always a new rollout: after a change of world size another may have carried the same id.
        return batch.rollout_id != self.rollout_id or batch.visit == 0

    def _is_stale(self, updates: int) -> bool:
        return 0 < self.reuse.max_age < updates - self.born

    def _rows(self, batch: PromptBatch, seed: int) -> list[int]:
        """Rows of visit v: every pass over the rollout has an order of its own, cut into `visits / passes` batches."""
        count = len(self.trajectories)
        size = max(1, batch.rows)
        per_pass = max(1, count // size)
        turn, part = divmod(batch.visit, per_pass)
        generator = torch.Generator().manual_seed(seed_of(seed, "visit order", turn))
        return torch.randperm(count, generator=generator)[part * size : (part + 1) * size].tolist()

    def state_dict(self) -> dict[str, Any]:
        """An unfinished rollout's tensors: only plain values and tensors, so that safe loading works."""
        kept = not self.at_boundary and self.reuse.checkpoint == "tensors"
        return {
            "rollout_id": self.rollout_id if kept else -1,
            "visits_left": self.visits_left,
            "born": self.born,
            "trajectories": [asdict(each) for each in self.trajectories] if kept else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up an unfinished rollout."""
        self.rollout_id, self.visits_left, self.born = state["rollout_id"], state["visits_left"], state["born"]
        self.trajectories = [Trajectory(**{**d, "blocks": BlockLog(**d["blocks"])}) for d in state["trajectories"]]
        if self.visits_left and not self.trajectories:
            rank_zero_warn(
                "The checkpoint was written in the midst of a rollout and without its tensors (model.reuse.checkpoint = "
                "boundary): the rollout is made again by the drafter of now, so this run is not the one that was stopped, "
                "to the last bit. No prompt is repeated or left out."
            )
