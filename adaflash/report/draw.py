"""Panels: small charts as SVG that takes its colours and letters from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from adaflash.errors import UserError
from adaflash.report.style import STAND_IN, Look, with_variables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (3.1, 2.2)  # inches: 298 pixels wide as drawn
STRETCH = 1.4  # how far a page may enlarge it
INK, MUTED, LINE, SURFACE = (STAND_IN[name] for name in ("ink", "muted", "line", "surface"))
SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "adaflash", "font.size": 9.0, "font.family": "DejaVu Sans",
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": LINE, "axes.linewidth": 1.0,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.7,
    "axes.facecolor": "none", "figure.facecolor": "none", "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip
_numbers = count()


@dataclass(frozen=True)
class Panel:
    """One chart, and what it says to those who do not see it."""

    title: str
    svg: Markup
    label: str


@dataclass(frozen=True)
class Line:
    """Points of one series. Hollow ones rest on few counts; `low` and `high` are ends of an interval."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    hollow: Sequence[bool] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    faint: bool = False  # what it was before


def lines(
    title: str,
    some: Sequence[Line],
    x: str,
    y: str,
    limits: tuple[float | None, float | None] = (None, None),
    level: float | None = None,
    band: float = 0.0,
    diagonal: bool = False,
    ticks: Sequence[float] = (),
    log: bool = False,
) -> Panel:
    """A line chart. `level` is a thin line at that height, `band` a shade around it; `ticks` are the places named on x."""
    axes = _axes(x, y)
    if log:
        axes.set_xscale("log", base=2)
    if level is not None:
        axes.axhline(level, color=MUTED, linewidth=1, zorder=1)
        axes.axhspan(level - band, level + band, color=MUTED, alpha=0.14, linewidth=0, zorder=0)
    if diagonal:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, dashes=(2, 2))
    for each in some:
        _line(axes, each)
    axes.set_ylim(*limits)
    axes.yaxis.set_major_locator(_locator(5))
    _ticks(axes, ticks or sorted({at for each in some for at in each.x}), log)
    said = "; ".join(f"{each.label}: {_ends(each)}" for each in some if len(each.x))
    return _panel(axes, title, f"{title}, {y} by {x}. {said or 'nothing was measured'}")


def bars(title: str, groups: Sequence[str], some: Sequence[tuple[str, Look, Sequence[float]]], x: str, y: str) -> Panel:
    """Bars side by side, a colour a series, a cluster a group."""
    axes = _axes(x, y)
    width = 0.8 / max(len(some), 1)
    for at, (label, look, values) in enumerate(some):
        places = [g - 0.4 + width * (at + 0.5) for g in range(len(groups))]
        axes.bar(places, values, width * 0.92, color=look.stand_in, label=label, linewidth=0)
    axes.set_xticks(range(len(groups)), groups)
    axes.yaxis.set_major_locator(_locator(5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    told = [
        f"{label}: {', '.join(f'{g} {v:.0%}' for g, v in zip(groups, values, strict=True))}"
        for label, _, values in some
    ]
    return _panel(axes, title, f"{title}, {y} by {x}. {'; '.join(told)}")


def stacks(title: str, names: Sequence[str], parts: Sequence[tuple[str, Look, Sequence[float]]]) -> Panel:
    """Horizontal bars of shares, one a name, parts end to end and divided by a gap."""
    axes = _axes("", "", height=0.4 + 0.29 * len(names))
    left = [0.0] * len(names)
    for label, look, values in parts:
        axes.barh(
            range(len(names)), values, 0.62, left, color=look.stand_in, label=label, edgecolor=SURFACE, linewidth=1.2
        )
        for place, (start, value) in enumerate(zip(left, values, strict=True)):
            if value >= 0.12:
                axes.text(
                    start + value / 2, place, f"{value:.0%}", color=SURFACE, ha="center", va="center", fontsize=8.5
                )
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.grid(visible=False)
    axes.set_yticks(range(len(names)), list(names))
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_ylim(len(names) - 0.4, -0.6)
    told = [f"{n}: {', '.join(f'{label} {v[i]:.0%}' for label, _, v in parts)}" for i, n in enumerate(names)]
    return _panel(axes, title, f"{title}. {'; '.join(told)}")


def _axes(x: str, y: str, height: float = SIZE[1]) -> Axes:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("adaflash report draws with matplotlib: pip install 'adaflash[report]'") from None

    with rc_context(SETTINGS):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return axes


def _line(axes: Axes, each: Line) -> None:
    look = each.look
    dash = {"dashes": (1, 2)} if each.faint else {"dashes": look.dash} if look.dash else {}
    shade = {"alpha": 0.55} if each.faint else {}
    axes.plot(each.x, each.y, color=look.stand_in, linewidth=1.2 if each.faint else 1.8, **dash, **shade)  # type: ignore[arg-type]
    if each.low:
        axes.vlines(each.x, each.low, each.high, color=look.stand_in, linewidth=1.2, alpha=0.7)
    if each.faint and len(each.x) == 1:
        axes.plot(each.x, each.y, "_", color=look.stand_in, markersize=7, alpha=0.55, clip_on=False)
    if each.faint or len(each.x) > 40:
        return
    hollow = each.hollow or [False] * len(each.x)
    for px, py, empty in zip(each.x, each.y, hollow, strict=True):
        face = SURFACE if empty else look.stand_in
        axes.plot(
            [px], [py], look.mark, color=look.stand_in, markersize=5, markerfacecolor=face, clip_on=False, zorder=3
        )


def _ticks(axes: Axes, places: Sequence[float], log: bool) -> None:
    """Every place where there is room for its name, else whole numbers in between."""
    gaps = [b - a for a, b in pairwise(places)]
    crowded = not log and gaps and min(gaps) < (places[-1] - places[0]) / 8
    if 0 < len(places) <= 8 and not crowded:
        axes.set_xticks(list(places), [f"{place:g}" for place in places])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(_locator(5, integer=True))


def _locator(most: int, integer: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=integer, steps=[1, 2, 2.5, 5, 10])


def _ends(each: Line) -> str:
    if len(each.x) == 1:
        return f"{each.y[0]:.3g} at {each.x[0]:g}"
    return f"{each.y[0]:.3g} at {each.x[0]:g}, {each.y[-1]:.3g} at {each.x[-1]:g}"


def _panel(axes: Axes, title: str, label: str) -> Panel:
    from matplotlib import rc_context

    figure, text = axes.figure, io.StringIO()
    with rc_context(SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None})  # type: ignore[union-attr]
    return Panel(title, Markup(inline(text.getvalue(), label)), label)


def inline(svg: str, label: str) -> str:
    """Matplotlib's file as an element of a page: no header, no style of its own, ids that occur once."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    number = next(_numbers)
    svg = re.sub(r'((?:id="|#))([mpCh][0-9a-f]{8,})', rf"\1v{number}\2", svg)
    width = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    pixels = float(width.group(1)) * 4 / 3 * STRETCH if width else 0
    head = f'<svg role="img" aria-label="{Markup.escape(label)}" style="max-width: {pixels:.0f}px" viewBox='
    return with_variables(re.sub(r"<svg [^>]*?viewBox=", lambda _: head, svg, count=1))
