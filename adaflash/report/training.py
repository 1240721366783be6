"""Figures of training: tau, acceptance by position, loss terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaflash.bench.history import Entry
from adaflash.decoding.stats import ENOUGH, OVERALL
from adaflash.decoding.tally import Tally
from adaflash.report.draw import Line, lines
from adaflash.report.figure import Figure, Table, looks, number
from adaflash.report.reading import Run


def domains(runs: Sequence[Run]) -> list[str]:
    """All domains together first, then each that any run was validated on."""
    names = {name for run in runs for entry in run.validations for name in entry.tallies}
    return [OVERALL, *sorted(names - {OVERALL})] if names else []


def tau(runs: Sequence[Run]) -> Figure:
    """Tau of every validation, by domain."""
    look, charts, rows = looks(runs), {}, []
    for domain in domains(runs):
        found = [(run, _by_update(run, domain)) for run in runs]
        some = [Line(run.name, look[run.name], list(points), list(points.values())) for run, points in found if points]
        if some:
            charts[domain] = some
        rows += [(run.name, domain, str(at), f"{value:.3f}") for run, points in found for at, value in points.items()]
    room = _room([each for some in charts.values() for each in some], 1.0)
    panels = [lines(domain, some, "updates", "tau", limits=room) for domain, some in charts.items()]
    return Figure(
        "tau",
        "Tau over training",
        "Tokens committed per drafted round, at every validation. 1.00 means the draft never helps; the most a block can "
        "give is its size. All panels have the same scale.",
        panels,
        Table(("run", "domain", "update", "tau"), rows),
        list(look.items()),
        "No validation was recorded.",
    )


def acceptance(runs: Sequence[Run]) -> Figure:
    """Acceptance of candidate k given that all before it were accepted: first and latest validation."""
    look, panels, rows = looks(runs), [], []
    for domain in domains(runs):
        some = []
        for run in runs:
            for entry, faint in _ends(run):
                points = list(_conditional(entry.tallies.get(domain)))
                if points:
                    k, rate, risk = zip(*points, strict=True)
                    label = f"{run.name}, update {entry.step}"
                    some.append(Line(label, look[run.name], k, rate, [n < ENOUGH for n in risk], faint=faint))
                rows += [(run.name, domain, str(entry.step), str(k), f"{rate:.3f}", str(n)) for k, rate, n in points]
        if some:
            panels.append(lines(domain, some, "candidate k", "accepted", limits=(0, 1)))
    return Figure(
        "acceptance",
        "Acceptance by position and domain",
        f"Share of candidates k that were accepted, given that all before them were. Dotted: the first validation. Hollow "
        f"marks rest on fewer than {ENOUGH} blocks.",
        panels,
        Table(("run", "domain", "update", "candidate", "accepted", "blocks at risk"), rows),
        list(look.items()),
        "No validation was recorded.",
    )


def losses(runs: Sequence[Run]) -> Figure:
    """Every loss term over training."""
    look, panels, rows = looks(runs), [], []
    for name in sorted({name for run in runs for name in run.metrics if name.startswith("loss/")}):
        found = {run.name: dict(sorted(run.metrics[name].items())) for run in runs if name in run.metrics}
        some = [Line(key, look[key], list(points), list(points.values())) for key, points in found.items()]
        panels.append(lines(name.removeprefix("loss/"), some, "updates", "loss"))
        rows += [
            (key, name, str(at), number(value, ".4f")) for key, points in found.items() for at, value in points.items()
        ]
    return Figure(
        "losses",
        "Loss terms",
        "Weighted contributions, averaged over the blocks of one update.",
        panels,
        Table(("run", "term", "update", "loss"), rows),
        [(name, each) for name, each in look.items() if any(row[0] == name for row in rows)],
        "No update was logged.",
    )


def _by_update(run: Run, domain: str) -> dict[int, float]:
    taus = {
        entry.step: entry.tallies[domain].numbers().get("tau") for entry in run.validations if domain in entry.tallies
    }
    return {step: value for step, value in taus.items() if value is not None}


def _ends(run: Run) -> Iterator[tuple[Entry, bool]]:
    """First validation (faint), then the latest."""
    if len(run.validations) > 1:
        yield run.validations[0], True
    if run.validations:
        yield run.validations[-1], False


def _conditional(tally: Tally | None) -> Iterator[tuple[int, float, int]]:
    """k, accepted share, blocks at risk."""
    for k, (survived, at_risk) in enumerate(tally.conditional() if tally else (), start=1):
        if at_risk:
            yield k, survived / at_risk, at_risk


def _room(some: Sequence[Line], floor: float) -> tuple[float, float]:
    """Limits that begin just below the floor and leave room above; the same for all panels, so that they compare."""
    top = max((value for each in some for value in each.y), default=floor)
    span = max(top - floor, 0.1)
    return floor - 0.05 * span, top + 0.1 * span
