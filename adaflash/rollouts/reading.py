"""Responses that are known already: one read of the target gives their context and teacher states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from adaflash.errors import UserError
from adaflash.rollouts.base import Players
from adaflash.types import BlockLog, Prompt, Segments, Trajectory


def bare(prompt: Prompt, players: Players, max_new_tokens: int) -> Trajectory:
    """The trajectory of a prompt with its response, without states; what is longer is cut and ends by length.

    Raises:
        UserError: the prompt alone fills the target's context.
    """
    room = min(max_new_tokens, players.target.max_positions - len(prompt.tokens))
    if room < 1 and prompt.response:
        raise UserError(
            f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens; the target's context holds "
            f"{players.target.max_positions}. Set data.max_prompt_tokens below that"
        )
    tokens = torch.tensor([*prompt.tokens, *prompt.response[:room]], dtype=torch.int64)
    finish = prompt.finish if len(prompt.response) <= room else "length"
    none = BlockLog.empty(players.drafter.block_size - 1)
    return Trajectory(prompt.id, prompt.domain, tokens, len(prompt.tokens), finish, none)


@torch.no_grad()
def read_states(trajectories: Sequence[Trajectory], players: Players, read_rows: int) -> list[Trajectory]:
    """The same trajectories with their states, in packs of up to `read_rows` tokens; none sees another one's tokens.

    Trajectories of about the same length share a pack, so that little of it is padding where the kernel pads.
    """
    order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].tokens))
    read = [each for pack in packs([trajectories[i] for i in order], read_rows) for each in _read(pack, players)]
    return [each for _, each in sorted(zip(order, read, strict=True), key=lambda pair: pair[0])]


def packs(trajectories: Sequence[Trajectory], read_rows: int) -> Iterator[list[Trajectory]]:
    """Consecutive trajectories of together at most `read_rows` tokens; a longer one is alone."""
    pack: list[Trajectory] = []
    rows = 0
    for each in trajectories:
        if pack and rows + len(each.tokens) > read_rows:
            yield pack
            pack, rows = [], 0
        pack.append(each)
        rows += len(each.tokens)
    if pack:
        yield pack


def _read(pack: list[Trajectory], players: Players) -> list[Trajectory]:
    tokens = torch.cat([each.tokens for each in pack]).to(players.target.device)
    segments = Segments.whole([len(each.tokens) for each in pack])
    features = players.target.read(tokens, segments, players.drafter.context_layers)
    return [
        Trajectory(
            each.id, each.domain, each.tokens, each.prompt_length, each.finish, each.blocks,
            context=features.context[row : row + len(each.tokens)].clone(),
            teacher=features.hidden[row + each.prompt_length : row + len(each.tokens)].clone(),
        )
        for each, row in zip(pack, segments.offsets, strict=False)
    ]  # fmt: skip
