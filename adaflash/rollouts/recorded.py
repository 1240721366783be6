"""Rollouts that are in the data already: one read of the target gives their context and teacher states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from adaflash.errors import UserError
from adaflash.rollouts.base import Players, RolloutSource
from adaflash.types import BlockLog, Prompt, Segments, Trajectory


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

    @torch.no_grad()
    def collect(self, prompts: Sequence[Prompt], players: Players) -> list[Trajectory]:
        """The recorded responses. Raises ValueError naming prompts that have none."""
        missing = [prompt.id for prompt in prompts if not prompt.response]
        if missing:
            raise UserError(
                f"RecordedRollout needs recorded responses, but {len(missing)} prompts have none (first: {missing[0]!r}). "
                "Point data.train at rows with response_ids (`adaflash predict` writes them), or use "
                "--model.rollout=adaflash.rollouts.live.LiveRollout"
            )
        return [each for group in self._groups(prompts, players) for each in self._read(group, players)]

    def _groups(self, prompts: Sequence[Prompt], players: Players) -> Iterator[list[Trajectory]]:
        group: list[Trajectory] = []
        rows = 0
        for prompt in prompts:
            trajectory = self._bare(prompt, players)
            if group and rows + len(trajectory.tokens) > self.read_rows:
                yield group
                group, rows = [], 0
            group.append(trajectory)
            rows += len(trajectory.tokens)
        yield group

    def _bare(self, prompt: Prompt, players: Players) -> Trajectory:
        room = min(self.max_new_tokens, players.target.max_positions - len(prompt.tokens))
        if room < 1:
            raise UserError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens; the target's context holds "
                f"{players.target.max_positions}. Set data.max_prompt_tokens below that"
            )
        tokens = torch.tensor([*prompt.tokens, *prompt.response[:room]], dtype=torch.int64)
        finish = prompt.finish if len(prompt.response) <= room else "length"
        none = BlockLog.empty(players.drafter.block_size - 1)
        return Trajectory(prompt.id, prompt.domain, tokens, len(prompt.tokens), finish, none)

    def _read(self, group: list[Trajectory], players: Players) -> list[Trajectory]:
        tokens = torch.cat([each.tokens for each in group]).to(players.target.device)
        segments = Segments.whole([len(each.tokens) for each in group])
        features = players.target.read(tokens, segments, players.drafter.context_layers)
        return [
            Trajectory(
                each.id, each.domain, each.tokens, each.prompt_length, each.finish, each.blocks,
                context=features.context[row : row + len(each.tokens)].clone(),
                teacher=features.hidden[row + each.prompt_length : row + len(each.tokens)].clone(),
            )
            for each, row in zip(group, segments.offsets, strict=False)
        ]  # fmt: skip

    def describe(self) -> str:
        return "recorded responses"
