"""The rows of a benchmark as a table, and below it everything that a reader must know to believe it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from adaflash.bench.cells import ACCOUNTED

WIDTH = 132  # columns that every cell of the table fits into
STYLES = {"gain": "bold green", "no gain": "bold red", "unclear": "yellow"}
COUNTS = ("tau", "verified / committed", "tokens / pass", "mean L", "plain steps")
SPEEDS = ("tok/s", "speed ratio", "modelled", "same text")


def render(rows: Sequence[dict[str, Any]], told: Sequence[str]) -> RenderableType:
    """One table a prompt set and load, counts first; `told` are lines about the whole benchmark."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["key"]["set"], row["load"]), []).append(row)
    tables = [_table(name, load, some) for (name, load), some in sorted(cells.items())]
    return Lines(*tables, *(Text(line) for line in [*active(rows), *told, *notes(rows)]))


def active(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What chose the lengths, and which it chose: L and the number of rounds."""
    lines = ["Active (L:rounds):"]
    for row in rows:
        if row["policy"] == "plain":
            continue
        counts = {name.removeprefix("lengths/"): n for name, n in row["counts"].items() if name.startswith("lengths/")}
        met = [f"{length}:{n}" for length, n in counts.items() if n]
        lengths = " ".join(met) + (" (always the same)" if len(met) == 1 else "") if met else "nothing drafted"
        lines.append(f"  {row['key']['set']}, {row['load']} at once: {row['policy']} is {row['described']}, {lengths}")
    return lines if len(lines) > 1 else []


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What makes rows doubtful."""
    found = []
    if busy := [row["machine"]["others"] for row in rows if row["machine"]["contended"]]:
        share = f"{min(busy):.0%} to {max(busy):.0%} of the cores during {len(busy)} of {len(rows)} measurements"
        found.append(f"* contended: other processes used {share}: trust the counts, not the speeds")
    for row in rows:
        where = f"{row['policy']}, {row['load']} at once, {row['key']['set']}"
        found += [
            f"NOT IDENTICAL: {each['id']} ({each['domain']}) differs from plain decoding at response token "
            f"{each['position']} ({where})"
            for each in row["differing"]
        ]
        found += [f"not served: {each['id']}: {each['error']} ({where})" for each in row["failed"]]
        if row["accounted"] < ACCOUNTED:
            found.append(f"time split: only {row['accounted']:.1%} of the wall time is accounted for ({where})")
        if row["interval"] is None:
            found.append(f"no interval: {row['groups']} groups, at least 3 are needed ({where})")
    return found


def _table(name: str, load: int, rows: Sequence[dict[str, Any]]) -> Table:
    plain = next((row for row in rows if row["policy"] == "plain"), None)
    band = f"; equal means within {plain['band']:.1%} (plain against plain)" if plain else ""
    table = Table(title=f"{name}, {load} at once{band}", title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in (*COUNTS, *SPEEDS):
        table.add_column(column, justify="right", no_wrap=column in SPEEDS)
    table.add_column("verdict")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str | Text]:
    numbers, plain = row["numbers"], row["policy"] == "plain"
    interval = f" [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]" if row["interval"] else ""
    same = row["identical"] == row["prompts"]
    return [
        row["policy"] + (" *" if row["machine"]["contended"] else ""),
        _number(numbers.get("tau")),
        _number(numbers.get("verified_per_committed")),
        _number(numbers.get("tokens_per_pass")),
        _number(numbers.get("length/mean")),
        "-" if plain else f"{numbers.get('plain_share', 0.0):.0%}",
        _number(row["drafted"]["decode"], ".1f"),
        _number(row["ratio"]) + interval,
        _number(row["modelled_ratio"]),
        Text(f"{row['identical']}/{row['prompts']}", style="" if same else "bold red"),
        Text(row["verdict"], style=STYLES.get(row["verdict"], "")),
    ]


def _number(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)
