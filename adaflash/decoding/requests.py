"""Requests as they arrive: numbered, checked, and with the limit that the target's context sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaflash.targets.hf import HFTarget
from adaflash.types import Request


class Intake:
    """The requests of one stream. A source that has nothing to give right now yields None, and is asked again later."""

    def __init__(self, source: Iterable[Request | None]) -> None:
        self.exhausted = False
        self._source = iter(source)
        self._count = 0

    def take(self) -> tuple[int, Request] | None:
        """The next request and its number, or None if there is none now."""
        if self.exhausted:
            return None
        try:
            request = next(self._source)
        except StopIteration:
            self.exhausted = True
            return None
        if request is None:
            return None
        self._count += 1
        return self._count - 1, request


def room(requests: Sequence[Request], target: HFTarget) -> int:
    """Most positions that any of these requests can fill."""
    return max((len(r.prompt) + limit(r, target) for r in requests if not refusal(r, target)), default=0)


def limit(request: Request, target: HFTarget) -> int:
    """Most new tokens a request can get: what it asks for, and what the context holds."""
    return min(request.max_new_tokens, target.max_positions - len(request.prompt))


def refusal(request: Request, target: HFTarget) -> str:
    """Why a request cannot be served, or nothing."""
    if not request.prompt:
        return "the prompt is empty: at least one token is needed"
    if len(request.prompt) >= target.max_positions:
        return f"the prompt has {len(request.prompt)} tokens; the target's context holds {target.max_positions}"
    if max(request.prompt) >= target.embedding_rows or min(request.prompt) < 0:
        return f"the prompt has token ids outside 0 .. {target.embedding_rows - 1}"
    if request.max_new_tokens < 0:
        return f"max_new_tokens is {request.max_new_tokens}; allowed are 0 and more"
    if not 0 <= request.temperature < float("inf"):
        return f"temperature is {request.temperature}; allowed are 0 (greedy) and more"
    if request.top_k < 0 or not 0 < request.top_p <= 1:
        return f"top_k is {request.top_k} and top_p {request.top_p}; allowed are top_k >= 0 and 0 < top_p <= 1"
    if request.stop and (target.tokenizer is None or not all(request.stop)):
        return "stop strings must not be empty, and need a target with a tokenizer"
    if not -(2**63) <= request.seed < 2**63:
        return f"seed is {request.seed}; allowed are 64-bit integers"
    return ""
