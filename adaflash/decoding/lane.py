"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adaflash.decoding.text import TextStream
from adaflash.decoding.verify import Draft
from adaflash.types import BlockLog, Features, Request, Trajectory


class Lane:
    """A request in a place of the pool. Its last token, the anchor, is known but in no cache yet.

    Args:
        place: Lane of the pool.
        index: Number of the request in its stream.
        request: What is asked for.
        limit: Most new tokens it may get.
        stop_ids: Every token id that ends it.
        text: Decodes the response, for a request with stop strings.
        keep: Keep context and teacher states.
        keep_windows: Keep the states of whole windows too.
    """

    def __init__(
        self,
        place: int,
        index: int,
        request: Request,
        limit: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        keep: bool = False,
        keep_windows: bool = False,
    ) -> None:
        self.place, self.index, self.request = place, index, request
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.limit, self.stop_ids = limit, stop_ids
        self.finish = ""
        self.error = ""
        self.plain_steps = 0
        self.ingested = 0  # context rows the drafter has seen
        self.waiting: list[Tensor] = []  # context rows it has not
        self._stream, self._text = text, ""
        self._keep, self._keep_windows = keep, keep_windows
        self._context: list[Tensor] = []
        self._teacher: list[Tensor] = []
        self._rounds: list[tuple[int, list[int], int, int, int]] = []
        self._forecasts: list[Tensor] = []
        self._windows: list[Tensor] = []

    @property
    def cached(self) -> int:
        """Length in the target's pool: every token but the anchor."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """New tokens still wanted."""
        return self.limit - (len(self.tokens) - self.prompt_length)

    def extend(self, tokens: list[int]) -> list[int]:
        """Commit tokens up to the first stop or the limit, before anything is counted; returns what was kept."""
        tokens = tokens[: self.remaining]
        stop = next((i for i, token in enumerate(tokens) if self._stops(token)), None)
        kept = tokens if stop is None else tokens[: stop + 1]
        self.tokens += kept
        if stop is not None:
            self.finish = "stop"
        elif self.remaining == 0:
            self.finish = "length"
        return kept

    def fail(self, error: str) -> None:
        """End with an error; what was committed stays."""
        self.finish, self.error = "error", error

    def read(self, features: Features, first: int, count: int, teaches: bool, drafting: bool) -> None:
        """Take rows first .. first + count - 1 of a pass: the states at the positions just committed to the pool."""
        rows = slice(first, first + count)
        if drafting:
            self.waiting.append(features.context[rows])
        if self._keep:  # copies: a slice would hold the states of all lanes and of rejected candidates with it
            self._context.append(features.context[rows].clone())
            if teaches:
                self._teacher.append(features.hidden[rows].clone())

    def log(self, anchor: int, draft: Draft, accepted: int, committed: int, features: Features, first: int) -> None:
        """Remember one drafted round, whose window begins at row `first` of the pass."""
        self._rounds.append((anchor, draft.candidates, len(draft.window), accepted, committed))
        if draft.forecast is not None:
            self._forecasts.append(draft.forecast)
        if self._keep_windows:
            self._windows.append(features.hidden[first : first + len(draft.window) + 1].clone())

    def trajectory(self, num_candidates: int) -> Trajectory:
        """What became of the request."""
        return Trajectory(
            id=self.request.id,
            domain=self.request.domain,
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            prompt_length=self.prompt_length,
            finish=self.finish,
            blocks=self._block_log(num_candidates),
            plain_steps=self.plain_steps,
            context=torch.cat(self._context) if self._context else None,
            teacher=torch.cat(self._teacher) if self._teacher else None,
            error=self.error,
        )

    def _stops(self, token: int) -> bool:
        """Whether this next token ends the response: by its id, or by the text it completes."""
        if token in self.stop_ids:
            return True
        if self._stream is None:
            return False
        new = self._stream.push([token])
        self._text += new
        longest = max(map(len, self.request.stop))
        tail = self._text[-(longest + len(new)) :]
        return any(stop in tail for stop in self.request.stop)

    def _block_log(self, num_candidates: int) -> BlockLog:
        if not self._rounds:
            return BlockLog.empty(num_candidates)
        anchors, candidates, lengths, accepted, committed = zip(*self._rounds, strict=True)
        padded = [row + [-1] * (num_candidates - len(row)) for row in candidates]
        log = BlockLog(*(torch.tensor(x, dtype=torch.int64) for x in (anchors, padded, lengths, accepted, committed)))
        asked = len(self._forecasts) == len(self._rounds)
        return replace(
            log,
            forecast=torch.stack(self._forecasts) if asked else None,
            states=torch.cat(self._windows) if self._windows else None,
        )
