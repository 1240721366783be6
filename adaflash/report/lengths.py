"""Figures of the length policy: what it chose, and whether what it expected came true."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from adaflash.decoding.stats import ENOUGH, OVERALL
from adaflash.decoding.tally import Tally
from adaflash.report.draw import Line, bars, lines
from adaflash.report.figure import Figure, Table, looks, number
from adaflash.report.reading import Run
from adaflash.report.style import Look
from adaflash.report.training import domains

ERROR = "val/length/error"
Bins = dict[int, list[float]]  # candidates, sum foreseen, survived


def chosen(runs: Sequence[Run]) -> Figure:
    """Histogram of L and share of plain steps in the latest validation."""
    look, panels, rows = looks(runs), [], []
    for domain in domains(runs):
        found = {run.name: tally for run in runs if (tally := _latest(run, domain)) and sum(tally.lengths)}
        most = max((len(tally.lengths) for tally in found.values()), default=0)
        some = [(name, look[name], _shares(tally, most)) for name, tally in found.items()]
        if some:
            panels.append(
                bars(domain, [str(length) for length in range(most)], some, "candidates verified (L)", "rounds")
            )
        rows += [_row(name, domain, tally) for name, tally in found.items()]
    return Figure(
        "lengths",
        "Lengths chosen",
        "Share of drafted rounds by the number of candidates sent to be verified, in the latest validation. The table adds "
        "the share of plain steps: passes of the target without a draft.",
        panels,
        Table(("run", "domain", "mean L", "wasted", "lost", "regret", "plain steps", "rounds by L"), rows),
        list(look.items()),
        "No round was drafted in a validation.",
        [note for run in runs if (note := _always(run.name, _latest(run, OVERALL)))],
        filled=True,
    )


def calibration(runs: Sequence[Run]) -> Figure:
    """Foreseen survival against what survived, by domain; and the error of the expected acceptance."""
    look, panels, rows = looks(runs), [], []
    found = {run.name: _bins(run) for run in runs if run.reliability}
    names = {domain for by_domain in found.values() for domain in by_domain}
    for domain in [name for name in (OVERALL, *sorted(names - {OVERALL})) if name in names]:
        some = [_curve(name, look[name], by_domain[domain]) for name, by_domain in found.items() if domain in by_domain]
        panels.append(
            lines(domain, some, "foreseen S", "survived", (0, 1), diagonal=True, ticks=(0, 0.25, 0.5, 0.75, 1))
        )
        for name, by_domain in found.items():
            for cell, (n, foreseen, survived) in sorted(by_domain.get(domain, {}).items()):
                where = f"{cell / 10:.1f}–{(cell + 1) / 10:.1f}"
                rows.append((name, domain, where, f"{n:.0f}", f"{foreseen / n:.3f}", f"{survived / n:.3f}"))
    errors = {run.name: dict(sorted(run.metrics[ERROR].items())) for run in runs if ERROR in run.metrics}
    if errors:
        some = [Line(name, look[name], list(points), list(points.values())) for name, points in errors.items()]
        panels.append(lines("error of the expected acceptance", some, "updates", "candidates", limits=(0, None)))
        for name, each in errors.items():
            rows += [(name, "error", f"update {at}", "", "", number(value, ".3f")) for at, value in each.items()]
    silent = [run.name for run in runs if not run.reliability and run.name not in errors]
    return Figure(
        "calibration",
        "Length calibration",
        f"Do candidates survive as often as the length policy foresees? On the diagonal they do. Hollow marks rest on fewer "
        f"than {ENOUGH} candidates. A head that expects one number a block has an error and no curve.",
        panels,
        Table(("run", "domain", "foreseen S", "candidates", "mean foreseen", "survived or error"), rows),
        [(name, each) for name, each in look.items() if name not in silent],
        "None of these runs recorded what its policy expected (callback LengthMonitor).",
        [f"{', '.join(silent)}: nothing recorded; the callback LengthMonitor does."] if silent and panels else [],
    )


def _always(name: str, tally: Tally | None) -> str:
    """Says so where the policy did not choose at all; empty where it did."""
    met = [length for length, rounds in enumerate(tally.lengths) if rounds] if tally else []
    if len(met) != 1 or tally is None:
        return ""
    what = "the whole block" if met[0] == len(tally.lengths) - 1 else f"{met[0]} candidates"
    return f"{name}: every drafted round verified {what}, whatever the block: nothing was adaptive here."


def _latest(run: Run, domain: str) -> Tally | None:
    return run.validations[-1].tallies.get(domain) if run.validations else None


def _shares(tally: Tally, count: int) -> list[float]:
    total = sum(tally.lengths)
    return [n / total for n in tally.lengths] + [0.0] * (count - len(tally.lengths))


def _row(name: str, domain: str, tally: Tally) -> tuple[str, ...]:
    numbers = tally.numbers()
    told = [number(numbers.get(f"length/{key}")) for key in ("mean", "wasted", "lost", "regret")]
    by_length = " ".join(f"{length}:{n}" for length, n in enumerate(tally.lengths) if n)
    return name, domain, *told, number(numbers.get("plain_share"), ".1%"), by_length


def _bins(run: Run) -> dict[str, Bins]:
    """Sums of the latest update, positions together: by domain, and of all of them."""
    last = max(int(row["step"]) for row in run.reliability)
    sums: dict[str, Bins] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    for row in run.reliability:
        if int(row["step"]) != last:
            continue
        for domain in {row["domain"], OVERALL}:
            cell = sums[domain][int(row["bin"])]
            for place, name in enumerate(("candidates", "foreseen", "survived")):
                cell[place] += float(row[name])
    return {domain: dict(bins) for domain, bins in sums.items()}


def _curve(name: str, look: Look, bins: Bins) -> Line:
    points = [(foreseen / n, survived / n, n < ENOUGH) for _, (n, foreseen, survived) in sorted(bins.items()) if n]
    x, y, hollow = zip(*points, strict=True)
    return Line(name, look, x, y, hollow)
