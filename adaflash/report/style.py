"""Colours, marks and dashes. Figures are drawn in stand-ins, which become variables of the page's style sheet.

A series is told apart three ways: by colour (six that stay apart for the common kinds of colour blindness), mark and dash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# name: (on light, on dark)
COLORS = {
    "ink": ("#1c2330", "#e6e9ef"),
    "muted": ("#5a6474", "#a3adbd"),
    "line": ("#d5dae2", "#343c49"),
    "surface": ("#ffffff", "#171b22"),
    "s0": ("#0b62a8", "#62b0f2"),
    "s1": ("#c2470a", "#ff9550"),
    "s2": ("#0a7a5c", "#45c9a0"),
    "s3": ("#9c2f78", "#ea94cf"),
    "s4": ("#806400", "#e2c04c"),
    "s5": ("#4a5261", "#c3cad6"),
}
SERIES = tuple(name for name in COLORS if re.fullmatch(r"s\d", name))
STAND_IN = {name: f"#5eed{i:02x}" for i, name in enumerate(COLORS)}
_STAND_INS = re.compile("|".join(STAND_IN.values()), re.IGNORECASE)
_NAMES = {hexed: name for name, hexed in STAND_IN.items()}
MARKS = ("o", "s", "^", "D", "v")
SHAPES = {
    "o": "M14 2.5a3.5 3.5 0 1 0 .01 0z",
    "s": "M10.8 2.8h6.4v6.4h-6.4z",
    "^": "M14 2l4 7.5h-8z",
    "D": "M14 1.5l4.5 4.5-4.5 4.5-4.5-4.5z",
    "v": "M14 10l4-7.5h-8z",
}  # of a mark in the legend, 28 x 12
DASHES: tuple[tuple[float, ...], ...] = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0))


@dataclass(frozen=True)
class Look:
    """How one series looks."""

    color: str  # name in COLORS
    mark: str
    dash: tuple[float, ...]

    @property
    def stand_in(self) -> str:
        """The colour to draw with."""
        return STAND_IN[self.color]

    @property
    def shape(self) -> str:
        """The mark as an SVG path for the legend."""
        return SHAPES[self.mark]


def look(number: int) -> Look:
    """Of series 0, 1, ...: twelve that differ in at least two ways from one another."""
    return Look(SERIES[number % len(SERIES)], MARKS[number % len(MARKS)], DASHES[number % len(DASHES)])


def with_variables(svg: str) -> str:
    """Stand-ins become `var(--name)`."""
    return _STAND_INS.sub(lambda found: f"var(--{_NAMES[found.group().lower()]})", svg)


def variables(dark: bool) -> str:
    """Declarations for the style sheet."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLORS.items())
