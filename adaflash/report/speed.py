"""Figures of speed: against concurrency, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaflash.bench.contenders import NAMES
from adaflash.report.draw import Line, lines, stacks
from adaflash.report.figure import Figure, Table, interval, number
from adaflash.report.reading import Run
from adaflash.report.style import Look, look

PARTS = ("verify", "draft", "head", "prefill", "ingest", "accept")
Row = dict[str, Any]


def throughput(runs: Sequence[Run]) -> Figure:
    """Tokens per second and ratio to plain decoding by requests at once, from the rows of `adaflash bench`."""
    panels, rows, noted = [], [], []
    looks = {name: look(number) for number, name in enumerate(NAMES)}
    met = [name for name in NAMES if any(row["policy"] == name for run in runs for row in run.bench)]
    for run in runs:
        for name in dict.fromkeys(row["key"]["set"] for row in run.bench):
            mine = [row for row in run.bench if row["key"]["set"] == name]
            where, x = f"{run.name}, {name}", "requests at once"
            band = max((row["band"] for row in mine if row["policy"] == "plain"), default=0.0)
            panels.append(lines(where, _speeds(mine, met, looks), x, "tokens/s", (0, None), log=True))
            if ratios := _ratios(mine, met, looks):
                panels.append(lines(where, ratios, x, "ratio to plain", level=1.0, band=band, log=True))
            rows += [_row(run.name, row) for row in mine]
            noted += _doubts(run.name, mine)
    return Figure(
        "throughput",
        "Throughput against concurrency",
        "Every policy took turns with plain decoding in one run (adaflash bench). Bars are 95 % intervals over groups of "
        "prompts; the shade is what plain decoding against itself showed: inside it, nothing is a difference.",
        panels,
        Table(("run", "prompts", "at once", "policy", "tau", "verified / committed", "tokens/s", "ratio [95 %]",
               "modelled", "verdict", "same text"), rows),
        [(name, looks[name]) for name in met],
        "No rows of adaflash bench lie in these folders; adaflash bench --checkpoint RUN writes them.",
        noted,
    )  # fmt: skip


def cost_split(runs: Sequence[Run]) -> Figure:
    """Where the time of drafted decoding goes, by run and, where it was measured, by policy and load."""
    found = {run.name: shares for run in runs if (shares := _split(run))}
    met = {part for bars in found.values() for bar in bars.values() for part in bar}
    names = [*PARTS, *sorted(met - set(PARTS))]
    looks = {part: Look(look(number).color, "s", ()) for number, part in enumerate(names)}
    panels = [
        stacks(run, list(bars), [(part, looks[part], [bar.get(part, 0.0) for bar in bars.values()]) for part in names])
        for run, bars in found.items()
    ]
    rows = [
        (run, name, *(f"{bar.get(part, 0.0):.1%}" for part in names))
        for run, bars in found.items()
        for name, bar in bars.items()
    ]
    return Figure(
        "cost",
        "Where the time goes",
        "Share of the drafted runs' decoding time: the target verifies; the drafter drafts and ingests context; head is the "
        "length policy and the drafter's vocabulary rows; accept is everything else on the host.",
        panels,
        Table(("run", "measured", *names), rows),
        list(looks.items()),
        "No speed was measured.",
        filled=True,
    )


def _split(run: Run) -> dict[str, dict[str, float]]:
    """Shares by part: of the gain table, and of each policy and load of a benchmark."""
    found = {"gain table": overall(run).get("parts")}
    found |= {f"{row['policy']}, {row['load']} at once": row["parts"] for row in run.bench if row["policy"] != "plain"}
    return {
        name: {part: value / (sum(parts.values()) or 1.0) for part, value in parts.items()}
        for name, parts in found.items()
        if parts
    }


def _speeds(rows: Sequence[Row], policies: Sequence[str], looks: dict[str, Look]) -> list[Line]:
    """While all lanes were busy; decode-only where they never were."""
    some = []
    for policy in policies:
        mine = [row for row in rows if row["policy"] == policy]
        points = {row["load"]: row["window"]["drafted"] or row["drafted"]["decode"] for row in mine}
        known = {load: value for load, value in sorted(points.items()) if value}
        if known:
            some.append(Line(policy, looks[policy], list(known), list(known.values())))
    return some


def _ratios(rows: Sequence[Row], policies: Sequence[str], looks: dict[str, Look]) -> list[Line]:
    some = []
    for policy in policies:
        mine = sorted((row for row in rows if row["policy"] == policy and row["ratio"]), key=lambda row: row["load"])
        if mine and policy != "plain":
            ends = [row["interval"] or (row["ratio"], row["ratio"]) for row in mine]
            low, high = zip(*ends, strict=True)
            x, y = [row["load"] for row in mine], [row["ratio"] for row in mine]
            some.append(Line(policy, looks[policy], x, y, low=low, high=high))
    return some


def _row(run: str, row: Row) -> tuple[str, ...]:
    numbers = row["numbers"]
    policy = row["policy"] if row["policy"] == "plain" else f"{row['policy']} ({row['described']})"
    return (
        run, row["key"]["set"], str(row["load"]), policy, number(numbers.get("tau")),
        number(numbers.get("verified_per_committed")), number(row["drafted"]["decode"], ".1f"),
        number(row["ratio"]) + interval(row["interval"]), number(row["modelled_ratio"]), row["verdict"],
        f"{row['identical']}/{row['prompts']}",
    )  # fmt: skip


def _doubts(run: str, rows: Sequence[Row]) -> list[str]:
    """What a reader must know to believe the speeds."""
    busy = [row for row in rows if row["machine"]["contended"]]
    told = (
        [f"{run}: the machine was also used by others during {len(busy)} of {len(rows)} measurements."] if busy else []
    )
    different = sum(len(row["differing"]) for row in rows)
    return told + ([f"{run}: {different} texts were NOT those of plain decoding."] if different else [])


def overall(run: Run) -> Row:
    """The gain of all domains together."""
    found = run.gain.get("domains") or [{}]
    return found[-1] if isinstance(found[-1], dict) else {}
