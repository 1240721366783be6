"""What the page shows: figures with their numbers beneath, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaflash.report.draw import Panel
from adaflash.report.reading import Run
from adaflash.report.style import Look, look


@dataclass(frozen=True)
class Table:
    """Text in rows; the first cell of each row is its header."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """Panels that share a legend. Without panels, `empty` says why there is nothing to see."""

    key: str
    title: str
    caption: str
    panels: Sequence[Panel]
    table: Table
    legend: Sequence[tuple[str, Look]] = ()
    empty: str = "None of these runs recorded it."
    notes: Sequence[str] = ()
    filled: bool = False  # the legend shows areas, not lines


def looks(runs: Sequence[Run]) -> dict[str, Look]:
    """One look for each run, the same in every figure."""
    return {run.name: look(number) for number, run in enumerate(runs)}


def number(value: float | None, spec: str = ".2f") -> str:
    """A number, or a dash."""
    return "–" if value is None else format(value, spec)


def interval(pair: Sequence[float] | None) -> str:
    """` [0.95, 1.11]`, or nothing."""
    return f" [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else ""
