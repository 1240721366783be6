"""Acceptance by position over training, as a picture: one row a validation, one column a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaflash.bench.history import Entry
from adaflash.decoding.stats import OVERALL
from adaflash.decoding.tally import Tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 12  # with more validations than this the numbers would not fit into their cells


def rates(entries: Sequence[Entry], domain: str) -> list[list[float | None]]:
    """[validations][K] acceptance of candidate k given that all before it were accepted; None: never at risk."""
    tallies = [entry.tallies.get(domain, Tally()) for entry in entries]
    wide = max((len(tally.at_risk) for tally in tallies), default=0)
    return [
        [top / bottom if bottom else None for top, bottom in tally.conditional()] or [None] * wide for tally in tallies
    ]


def heat_map(entries: Sequence[Entry]) -> Figure:
    """A panel per domain and one for all, the same scale in all of them. Raises ImportError where matplotlib is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state, no display
    from matplotlib.figure import Figure

    names = [name for name in entries[-1].tallies if name != OVERALL] + [OVERALL]
    figure = Figure(figsize=(3.4 * len(names) + 1.2, 1.2 + 0.3 * min(max(len(entries), 4), 24)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False).flat
    for axes, name in zip(panels, names, strict=True):
        cells = rates(entries, name)
        shown = [[float("nan") if rate is None else rate for rate in row] for row in cells]
        image = axes.imshow(shown, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(cells[0])), [str(k + 1) for k in range(len(cells[0]))], fontsize=8)
        axes.set_xlabel("candidate")
        if len(cells) <= ROWS and len(cells[0]) <= 8:
            for y, row in enumerate(cells):
                for x, rate in enumerate(row):
                    if rate is not None:
                        colour = "black" if rate > 0.5 else "white"
                        axes.text(x, y, f"{rate:.2f}", ha="center", va="center", fontsize=7, color=colour)
    every = -(-len(entries) // ROWS)
    places = range(0, len(entries), every)
    panels[0].set_yticks(places, [str(entries[place].step) for place in places], fontsize=8)
    panels[0].set_ylabel("update")
    figure.colorbar(image, ax=list(panels), label="accepted, if all before were")
    return figure
