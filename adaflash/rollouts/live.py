"""On-policy rollouts: the current drafter and the target decode the prompts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.fixed import FixedLength
from adaflash.rollouts.base import Law, Players, RolloutSource, sampling_law, seed_of
from adaflash.types import Prompt, Request, Trajectory


class LiveRollout(RolloutSource):
    """Decode with the engine that also validates and benchmarks.

    Its verify passes have already computed every context and teacher state of the response: no second pass is needed.

    Args:
        max_new_tokens: Longest response.
        temperature: 0 is greedy, as in the paper.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass.
        lanes: Requests decoded at once.
        warm_updates: Optimizer steps before a learned length policy is trusted with rollouts.
        warm_length: Candidates verified until then.
        teacher: What teaches a block the drafter really started (`model.anchor_mix` chooses how many are): the target
            along the "trajectory", or along the "draft", that is behind the drafter's own mistakes too, as far as they
            were verified. The drafter must not have changed much since: needs `data.reuse: 1`.
    """

    def __init__(
        self,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        lanes: int = 16,
        warm_updates: int = 100,
        warm_length: int = 4,
        teacher: Literal["trajectory", "draft"] = "trajectory",
    ) -> None:
        key = "model.rollout.init_args"
        if max_new_tokens < 2:
            raise UserError(f"{key}.max_new_tokens is {max_new_tokens}; a block to learn from needs at least 2 tokens")
        if lanes < 1:
            raise UserError(f"{key}.lanes is {lanes}; at least 1 request must be decoded at once")
        if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
            raise UserError(f"{key}: allowed are temperature >= 0, 0 < top_p <= 1 and top_k >= 0")
        self.max_new_tokens, self.temperature, self.top_k, self.top_p = max_new_tokens, temperature, top_k, top_p
        self.lanes, self.warm_updates, self.warm_length = lanes, warm_updates, warm_length
        self.teacher, self.once = teacher, teacher == "draft"

    def collect(self, prompts: Sequence[Prompt], players: Players) -> list[Trajectory]:
        """Responses of the current pair, with the blocks the drafter really started."""
        learned = any(True for _ in players.policy.parameters())
        policy = FixedLength(self.warm_length) if learned and players.updates < self.warm_updates else players.policy
        engine = Engine(
            players.target, players.drafter, policy, lanes=self.lanes, keep_states=True, keep_windows=self.once
        )
        return engine.generate([self._request(prompt, players.seed) for prompt in prompts])

    def _request(self, prompt: Prompt, seed: int) -> Request:
        return Request(
            prompt.tokens, self.max_new_tokens, prompt.id, prompt.domain, seed_of(seed, prompt.id),
            self.temperature, self.top_k, self.top_p,
        )  # fmt: skip

    def law(self) -> Law | None:
        return sampling_law(self.temperature, self.top_k, self.top_p)

    def describe(self) -> str:
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature}"
        taught = ", taught along the drafts" if self.once else ""
        return f"live rollouts, {how}, up to {self.max_new_tokens} tokens{taught}"
