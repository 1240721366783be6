"""How a run is spread over devices, and what is chosen by memory where nothing was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetPlace = Literal["replicate", "node", "world"]
RolloutMode = Literal["gathered", "lockstep"]

COPY = 0.4  # share of the free memory that a whole copy of the target may take for good
GATHER = 0.7  # ... and while a rollout is made; the rest is for caches and states


@dataclass
class ParallelOptions:
    """How a run is spread over devices. How drafter and length policy are trained is `trainer.strategy`.

    Attributes:
        target: Where the frozen target lies. `replicate`: a copy on every device; `node`: sharded over the devices of
            each node; `world`: sharded over all devices; `auto`: the first of these that leaves enough memory.
        rollouts: Decoding with a sharded target. `gathered`: its weights are brought together once a rollout, then every
            rank decodes on its own; `lockstep`: layer by layer in every pass, all ranks pass by pass together; `auto`:
            gathered if the weights fit.
        recompute: Compute the drafter's layers again in the backward pass instead of keeping their activations.
    """

    target: Literal["auto", "replicate", "node", "world"] = "auto"
    rollouts: Literal["auto", "gathered", "lockstep"] = "auto"
    recompute: bool = False

    def place(self, weights: int, room: int, per_node: int, nodes: int) -> TargetPlace:
        """Where a target of `weights` bytes lies on devices with `room` bytes free."""
        if self.target != "auto":
            return self.target
        if per_node * nodes == 1 or weights <= COPY * room:
            return "replicate"
        return "node" if nodes == 1 or (per_node > 1 and weights <= COPY * room * per_node) else "world"

    def mode(self, weights: int, room: int) -> RolloutMode:
        """How ranks decode with a sharded target of `weights` bytes in all."""
        if self.rollouts != "auto":
            return self.rollouts
        return "gathered" if weights <= GATHER * room else "lockstep"
