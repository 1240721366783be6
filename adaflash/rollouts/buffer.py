"""The rollout that training batches are taken from: made at its first visit, kept until its last."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from adaflash.rollouts.base import Players, RolloutSource, seed_of
from adaflash.types import BlockLog, PromptBatch, Trajectory


class RolloutBuffer:
    """Trajectories of one rollout, keyed by its id; its order of visits depends on the seed and the id alone."""

    def __init__(self) -> None:
        self.rollout_id = -1
        self.visits_left = 0
        self.born = 0  # optimizer steps done when it was made
        self.trajectories: list[Trajectory] = []

    def take(self, batch: PromptBatch, source: RolloutSource, players: Players) -> tuple[list[Trajectory], bool]:
        """The trajectories of this visit, and whether the rollout was made for it."""
        # A first visit is always a new rollout: after a change of world size another may have carried the same id.
        fresh = batch.rollout_id != self.rollout_id or batch.visit == 0
        if fresh:
            self.trajectories, self.visits_left = (
                [],
                0,
            )  # the states go before others come: there is room for one rollout
            with players.target.ranks.decoding():
                self.trajectories = source.collect(batch.prompts, players)
            self.rollout_id, self.born = batch.rollout_id, players.updates
        self.visits_left = batch.visits - batch.visit - 1
        return [self.trajectories[i] for i in self._rows(batch, players.seed)], fresh

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
        unfinished = self.visits_left > 0
        return {
            "rollout_id": self.rollout_id if unfinished else -1,
            "visits_left": self.visits_left,
            "born": self.born,
            "trajectories": [asdict(each) for each in self.trajectories] if unfinished else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up an unfinished rollout."""
        self.rollout_id, self.visits_left, self.born = state["rollout_id"], state["visits_left"], state["born"]
        self.trajectories = [Trajectory(**{**d, "blocks": BlockLog(**d["blocks"])}) for d in state["trajectories"]]
