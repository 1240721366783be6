"""Rollouts that are in the data already: one read of the target gives their context and teacher states."""

from __future__ import annotations

from collections.abc import Sequence

from adaflash.errors import UserError
from adaflash.rollouts.base import Players, RolloutSource
from adaflash.rollouts.reading import bare, read_states
from adaflash.types import Prompt, Trajectory


class RecordedRollout(RolloutSource):
    """Take the responses from the data (`prompt_ids` and `response_ids`, never decoded and re-encoded).

    Args:
        max_new_tokens: Longer responses are cut there, and count as ended by length.
        read_rows: Tokens the target reads in one pass.
    """

    def __init__(self, max_new_tokens: int = 2048, read_rows: int = 4096) -> None:
        if max_new_tokens < 2 or read_rows < 1:
            raise UserError("model.rollout.init_args: allowed are max_new_tokens >= 2 and read_rows >= 1")
        self.max_new_tokens, self.read_rows = max_new_tokens, read_rows

    def collect(self, prompts: Sequence[Prompt], players: Players) -> list[Trajectory]:
        """The recorded responses. Raises UserError naming prompts that have none."""
        missing = [prompt.id for prompt in prompts if not prompt.response]
        if missing:
            raise UserError(
                f"RecordedRollout needs recorded responses, but {len(missing)} prompts have none (first: {missing[0]!r}). "
                "Point data.train at rows with response_ids (`adaflash predict` writes them), or use "
                "--model.rollout=adaflash.rollouts.live.LiveRollout"
            )
        return read_states([bare(prompt, players, self.max_new_tokens) for prompt in prompts], players, self.read_rows)

    def describe(self) -> str:
        return "recorded responses"
