"""Reliability of survival as a picture and as a table: foreseen S_k against the share that really survived."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from adaflash.decoding.stats import ENOUGH, OVERALL
from adaflash.length.calibration import calibration_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("step", "domain", "k", "bin", "candidates", "foreseen", "survived")


def reliability_figure(domains: Sequence[str], survival: Tensor) -> Figure:
    """One panel per domain, one curve for the first, a middle and the last position and a thick one for all.

    Hollow points rest on fewer than `ENOUGH` candidates. Raises ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no global state, no display
    from matplotlib.figure import Figure

    panels = [(name, cells) for name, cells in zip(domains, survival, strict=True) if name]
    panels.append((OVERALL, survival.sum(0)))
    figure = Figure(figsize=(3.2 * len(panels) + 0.6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, cells) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        axes.plot([0, 1], [0, 1], ":", color="#9aa0a6")
        last = len(cells)
        for k in sorted({1, (last + 1) // 2, last}):
            axes.plot(*_points(cells[k - 1])[:2], "-", linewidth=1, label=f"k = {k}")
        x, y, enough = _points(cells.sum(0))
        axes.plot(x, y, "-", color="#1a73e8", linewidth=2, label="all k")
        for one, other, sure in zip(x, y, enough, strict=True):
            axes.plot(
                [one], [other], "o", color="#1a73e8", markersize=4, markerfacecolor="#1a73e8" if sure else "white"
            )
        error = calibration_error(cells.sum(0))
        axes.set_title(name if error is None else f"{name}: error {error:.3f}", fontsize=10)
        axes.set_xlabel("foreseen S_k")
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle("Do candidates survive as often as the length policy says?")
    return figure


def write_rows(path: Path, step: int, domains: Sequence[str], survival: Tensor) -> None:
    """Append every cell that holds candidates to a CSV file: sums, so that rows can be added up."""
    rows = [
        (step, domain or OVERALL, k + 1, b, int(n), round(foreseen, 4), int(survived))
        for domain, cells in zip(domains, survival.tolist(), strict=True)
        for k, bins in enumerate(cells)
        for b, (n, foreseen, survived) in enumerate(bins)
        if n
    ]
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


def _points(bins: Tensor) -> tuple[list[float], list[float], list[bool]]:
    """Mean foreseen, share survived and whether there are enough, of bins [BINS, 3] that hold candidates."""
    held = [(n, foreseen / n, survived / n) for n, foreseen, survived in bins.tolist() if n]
    return [x for _, x, _ in held], [y for _, _, y in held], [n >= ENOUGH for n, _, _ in held]
