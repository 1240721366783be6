"""From runs to one page: figures, tables and samples through a template that escapes everything."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import adaflash
from adaflash.bench.drafts import MARKS, Sample, visible
from adaflash.report import lengths, speed, style, summary, training
from adaflash.report.figure import looks
from adaflash.report.reading import Run

SAMPLES = 6  # a run; all of its latest update


def render(runs: Sequence[Run], title: str) -> str:
    """The whole page as HTML."""
    figures = [
        training.tau(runs),
        training.acceptance(runs),
        lengths.chosen(runs),
        lengths.calibration(runs),
        speed.throughput(runs),
        speed.cost_split(runs),
        training.losses(runs),
    ]
    return _environment().get_template("page.html.j2").render(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=adaflash.__version__,
        runs=runs,
        looks=looks(runs),
        headlines=[summary.headline(run) for run in runs],
        summary=summary.summary(runs),
        warnings=summary.warnings(runs),
        figures=figures,
        samples={run.name: latest(run.samples) for run in runs if run.samples},
        marks=MARKS,
        provenance={run.name: summary.provenance(run) for run in runs},
        configs={run.name: summary.config_text(run) for run in runs},
        light=Markup(style.variables(dark=False)),
        dark=Markup(style.variables(dark=True)),
    )  # fmt: skip


def latest(samples: Sequence[Sample]) -> list[Sample]:
    """Those of the newest update."""
    last = max(sample.step for sample in samples)
    return [sample for sample in samples if sample.step == last][:SAMPLES]


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("adaflash.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(visible=visible, dashes=_dashes, slug=_slug)
    return made


def _dashes(pattern: Sequence[float]) -> str:
    return " ".join(f"{length:g}" for length in pattern)


def _slug(text: Any) -> str:
    """For classes: a verdict without its space."""
    return "-".join(str(text).split())
