"""Yes-or-no options may stand bare: `--force` is `--force true`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def bare_switches(function: Callable[..., Any], words: Sequence[str]) -> list[str]:
    """The words of a command line, with a value for each switch of the function that has none."""
    parameters = inspect.signature(function).parameters.values()
    switches = {f"--{each.name}" for each in parameters if isinstance(each.default, bool)}
    followers = [*words[1:], "--"]
    return [
        f"{word}=true" if word in switches and follower.startswith("-") else word
        for word, follower in zip(words, followers, strict=False)
    ]
