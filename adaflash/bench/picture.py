"""Acceptance by position and domain as a picture: the first validation against the latest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaflash.bench.history import Entry
from adaflash.decoding.stats import ENOUGH
from adaflash.decoding.tally import Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = (
    "no picture of acceptance: matplotlib is not installed (pip install 'adaflash[report]'); numbers are in {file}"
)
BEFORE, NOW = "#9aa0a6", "#1a73e8"


def acceptance_figure(before: Entry, now: Entry) -> Figure:
    """One panel per domain: conditional acceptance of candidate k, given that all before it were accepted.

    Hollow points rest on fewer than `ENOUGH` blocks. Raises ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state, no display
    from matplotlib.figure import Figure

    names = list(now.tallies)
    across = min(len(names), 4)
    down = -(-len(names) // across)
    figure = Figure(figsize=(3.2 * across + 0.6, 2.9 * down + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        if name in before.tallies and before != now:
            _curve(axes, before.tallies[name], BEFORE, "--", f"step {before.step}")
        _curve(axes, now.tallies[name], NOW, "-", f"step {now.step}")
        _dress(axes, name, len(now.tallies[name].at_risk))
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("acceptance")
    figure.suptitle("Acceptance by position, all candidates before it accepted")
    return figure


def show(figure: Figure, path: Path | None, boards: Iterable[Any], tag: str, step: int) -> None:
    """Draw once, which is what takes time; write a PNG, whole or not at all, and hand the same pixels to TensorBoard."""
    from PIL import Image  # comes with matplotlib

    figure.dpi = 120
    figure.canvas.draw()
    pixels: Any = figure.canvas.buffer_rgba()  # type: ignore[attr-defined]
    image = Image.fromarray(np.asarray(pixels)[..., :3].copy())
    if path is not None:
        part = path.with_name(f".{path.name}.part")
        image.save(part, format="PNG")
        part.replace(path)
    for board in boards:
        board.add_image(tag, np.asarray(image), step, dataformats="HWC")


def _curve(axes: Axes, tally: Tally, color: str, style: str, label: str) -> None:
    points = [(k, s / n, n >= ENOUGH) for k, (s, n) in enumerate(tally.conditional(), start=1) if n]
    tau = f", tau {tally.numbers()['tau']:.2f}" if tally.rounds else ", nothing drafted"
    axes.plot([k for k, _, _ in points], [rate for _, rate, _ in points], style, color=color, label=label + tau)
    for k, rate, enough in points:
        axes.plot([k], [rate], "o", color=color, markersize=4, markerfacecolor=color if enough else "white")


def _dress(axes: Axes, name: str, candidates: int) -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("candidate k")
    axes.set_xlim(0.5, candidates + 0.5)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(range(1, candidates + 1, max(1, candidates // 8)))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="best", frameon=False)
