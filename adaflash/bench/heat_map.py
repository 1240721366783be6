"""Acceptance by position over training, as a picture: one row a validation, one column a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaflash.bench.history import Entry
from adaflash.decoding.stats import OVERALL
from adaflash.decoding.tally import Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ROWS = 12  # with more validations than this the numbers would not fit into their cells


def rates(entries: Sequence[Entry], domain: str) -> list[list[float | None]]:
    """[validations][K] acceptance of candidate k given that all before it were accepted; None: never at risk."""
    tallies = [entry.tallies.get(domain, Tally()) for entry in entries]
    wide = max((len(tally.at_risk) for tally in tallies), default=0)
    return [
        [top / bottom if bottom else None for top, bottom in tally.conditional()] or [None] * wide for tally in tallies
    ]


def heat_map(entries: Sequence[Entry]) -> Figure:
    """A panel per domain and one for all, two beside each other, the same scale in all of them.

    Cells of candidates that were never at risk are empty. Raises ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state, no display
    from matplotlib.figure import Figure

    names = [name for name in entries[-1].tallies if name != OVERALL] + [OVERALL]
    across, down = min(len(names), 2), -(-len(names) // 2)
    height = 0.9 + 0.25 * min(max(len(entries), 5), 16)
    figure = Figure(figsize=(3.6 * across + 1, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    images = [_panel(axes, name, rates(entries, name)) for axes, name in zip(panels, names, strict=False)]
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    places = range(0, len(entries), -(-len(entries) // ROWS))
    panels[0].set_yticks(places, [str(entries[place].step) for place in places], fontsize=8)
    figure.supylabel("update", fontsize=9)
    figure.supxlabel("candidate", fontsize=9)
    figure.colorbar(images[-1], ax=panels, label="accepted, if all before it were")
    return figure


def _panel(axes: Axes, name: str, cells: list[list[float | None]]) -> AxesImage:
    """One domain: colours that get lighter for everybody, and the numbers where there is room."""
    shown = [[float("nan") if rate is None else rate for rate in row] for row in cells]
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set_title(name, fontsize=10)
    axes.set_xticks(range(len(cells[0])), [str(k + 1) for k in range(len(cells[0]))], fontsize=8)
    known = [(x, y, rate) for y, row in enumerate(cells) for x, rate in enumerate(row) if rate is not None]
    for x, y, rate in known if len(cells) <= ROWS and len(cells[0]) <= 8 else []:
        colour = "black" if rate > 0.5 else "white"
        axes.text(x, y, f"{rate:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image
