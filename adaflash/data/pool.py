"""A source joined to the renderer: rows by number -> prompts, with bad rows found early or stepped over."""

from __future__ import annotations

import logging

from adaflash.data.chat import ChatRenderer
from adaflash.data.order import permutation
from adaflash.data.report import DataError, RowError
from adaflash.data.sources import PromptSource
from adaflash.types import Prompt

log = logging.getLogger(__name__)
CHECKED = 2000  # sources up to this size are rendered whole at setup, of larger ones a sample of SAMPLED rows
SAMPLED = 500
PROBES = 1000  # bad rows in a row before the stream gives up


class PromptPool:
    """Rendered prompts of one source. `number` tells sources apart in the shuffle."""

    def __init__(self, source: PromptSource, renderer: ChatRenderer, number: int, seed: int) -> None:
        self.source, self.renderer, self.number, self.seed = source, renderer, number, seed
        self._skipped, self._last = 0, ""

    def __len__(self) -> int:
        return len(self.source)

    def domain(self, index: int) -> str:
        """Domain of the i-th row."""
        return self.source.domain or self.source.row(index).domain

    def prompt(self, index: int) -> Prompt:
        """The i-th row, rendered. Raises RowError."""
        return self.renderer.prompt(self.source.row(index))

    def check(self, max_dropped: float) -> None:
        """Open the source and try to render it, so that a hopeless one is known before training. Raises DataError."""
        report = self.source.open()
        report.check(max_dropped)
        if len(self) <= CHECKED:
            self.source.drop(self._bad(range(len(self))))
            report.check(max_dropped)
            return
        rows = range(0, len(self), len(self) // SAMPLED)
        bad = self._bad(rows)
        self.source.drop(bad)
        if bad:
            report.notes.append(
                f"{len(bad)} of {len(rows)} sampled rows cannot be rendered; others like them are replaced on the way"
            )
        if len(bad) > max_dropped * len(rows):
            raise DataError(f"most of {report.name} cannot be rendered (data.max_dropped = {max_dropped:g}).\n{report}")

    def draw(self, k: int) -> Prompt:
        """The k-th sample of this source in shuffled order; a bad row is replaced by the next good one of its epoch."""
        epoch, at = divmod(k, len(self))
        order = permutation(len(self), self.seed, self.number, epoch)
        for step in range(min(len(self), PROBES)):
            index = int(order[(at + step) % len(self)])
            try:
                return self.prompt(index)
            except RowError as error:
                self.note(index, error)
        raise DataError(f"{self.source.name}: {PROBES} rows in a row cannot be used, the last one at {self._last}")

    def _bad(self, rows: range) -> dict[int, RowError]:
        bad = {}
        for index in rows:
            try:
                self.prompt(index)
            except RowError as error:
                bad[index] = error
        return bad

    def note(self, index: int, error: RowError) -> None:
        """Log a row that was stepped over, the first few and then seldom."""
        self._last = f"{self.source.where(index)}: {error}"
        self._skipped += 1
        if self._skipped <= 3 or self._skipped % 1000 == 0:
            log.warning("skipped %s (%d rows skipped so far by this worker)", self._last, self._skipped)
