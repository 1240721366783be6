"""A source joined to the renderer: rows by number -> prompts, with bad rows found early or stepped over."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from random import Random

from adaflash.data.base import PromptSource
from adaflash.data.chat import ChatRenderer
from adaflash.data.order import Shuffle
from adaflash.data.report import DataError, DropReport, RowError
from adaflash.types import Prompt

log = logging.getLogger(__name__)
CHECKED = 2000  # sources up to this size are rendered whole at setup, of larger ones a sample of SAMPLED rows
SAMPLED = 500
PROBES = 1000  # bad rows in a row before the stream gives up


class PromptPool:
    """Rendered prompts of one source.

    Args:
        source: Where the rows are.
        renderer: Makes prompts of them.
        number: Tells sources apart in the shuffle.
        seed: Of the shuffle.
    """

    def __init__(self, source: PromptSource, renderer: ChatRenderer, number: int, seed: int) -> None:
        self.source, self.renderer = source, renderer
        self.prints: dict[int, str] = {}  # hash of the prompts seen by `check` -> where they are
        self._number, self._seed = number, seed
        self._shuffle: Shuffle | None = None
        self._skipped, self._last = 0, ""

    def __len__(self) -> int:
        return len(self.source)

    def prompt(self, index: int) -> Prompt:
        """The i-th row, rendered. Raises RowError."""
        return self.renderer.prompt(self.source.row(index))

    def domain(self, index: int) -> str:
        """Domain of the i-th row."""
        return self.source.domain or self.source.row(index).domain

    def check(self, max_dropped: float) -> DropReport:
        """Open the source and try to render it, so that a hopeless one is known before training. Raises DataError."""
        report = self.source.open()
        report.check(max_dropped)
        count = len(self)
        rows: Sequence[int] = range(count) if count <= CHECKED else sorted(Random(0).sample(range(count), SAMPLED))
        bad = self._render(rows)
        self.source.drop(bad)
        if len(rows) < count and bad:
            report.notes.append(
                f"{len(bad)} of {len(rows)} sampled rows cannot be rendered; others are replaced when met"
            )
        if len(bad) > max_dropped * len(rows):
            raise DataError(f"most of {report.name} cannot be rendered (data.max_dropped = {max_dropped:g}).\n{report}")
        report.check(max_dropped)
        return report

    def draw(self, k: int) -> Prompt:
        """The k-th sample of this source in shuffled order; a bad row is replaced by the next good one of its epoch."""
        if self._shuffle is None:
            self._shuffle = Shuffle(len(self), self._seed, self._number)
        for step in range(min(len(self), PROBES)):
            index = self._shuffle(k, step)
            try:
                return self.prompt(index)
            except RowError as error:
                self.note(index, error)
        raise DataError(
            f"{self.source.name}: {self._skipped} rows cannot be used, at last {self._last}; nothing is left"
        )

    def note(self, index: int, error: RowError) -> None:
        """Log a row that was stepped over: the first few, then seldom."""
        self._last = f"{self.source.where(index)}: {error}"
        self._skipped += 1
        if self._skipped <= 3 or self._skipped % 1000 == 0:
            log.warning("skipped %s (%d rows so far in this process)", self._last, self._skipped)

    def _render(self, rows: Iterable[int]) -> dict[int, RowError]:
        """Rows that cannot be rendered, and why."""
        bad = {}
        for index in rows:
            try:
                self.prints[hash(self.prompt(index).tokens)] = self.source.where(index)
            except RowError as error:
                bad[index] = error
        return bad


def shared_prompts(train: Sequence[PromptPool], val: Sequence[PromptPool]) -> list[str]:
    """Where prompts of `val` are that `train` has too: what is measured on them is memory.

    Large sources are compared by what `check` sampled of them.
    """
    trained = {tokens for pool in train for tokens in pool.prints}
    return [where for pool in val for tokens, where in pool.prints.items() if tokens in trained]
