"""`acceptance.csv`: one row per validation and domain, so that "before" survives a resume, a kill and a second process."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from adaflash.decoding.stats import OVERALL, Report
from adaflash.decoding.tally import SINGLE, Tally

FILE = "acceptance.csv"
KEYS = ("run", "step", "stage", "domain")
SPREADS = ("domain_spread", "domain_range", "domain_spread/acceptance", "domain_range/acceptance", "position_spread")


@dataclass(frozen=True)
class Entry:
    """One validation: where in training it was, and its tallies by domain (`OVERALL` among them)."""

    run: int
    step: int
    stage: str
    tallies: dict[str, Tally]


class History:
    """Appends validations to `folder/acceptance.csv` and reads them back.

    A run begins with a validation at step 0 and owns every later row up to the next such beginning, so a folder that is
    used twice never compares with the "before" of an older training.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._run: int | None = None

    def append(self, step: int, stage: str, report: Report) -> None:
        """Write one row per domain and one for all; a number without a denominator is an empty cell."""
        if self._run is None:
            last = max((entry.run for entry in self.read()), default=0)
            self._run = last + 1 if step == 0 or not last else last
        keys = {"run": self._run, "step": step, "stage": stage}
        rows = []
        for domain, tally in report.tallies().items():
            spreads = report.spreads() if domain == OVERALL else {}
            rows.append({**keys, "domain": domain, **tally.numbers(), **spreads, **tally.counts()})
        self._write(rows, columns(report.total))

    def read(self) -> list[Entry]:
        """All complete validations, oldest first. Rows a kill cut short, or foreign ones, are skipped."""
        if not self.path.exists():
            return []
        entries: list[Entry] = []
        with self.path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                parsed = _parse(row)
                if parsed is None:
                    continue
                (run, step, stage), domain, tally = parsed
                if entries and (entries[-1].run, entries[-1].step, entries[-1].stage) == (run, step, stage):
                    entries[-1].tallies[domain] = tally
                else:
                    entries.append(Entry(run, step, stage, {domain: tally}))
        return [entry for entry in entries if OVERALL in entry.tallies]

    def first_and_latest(self, stage: str = "val") -> tuple[Entry, Entry] | None:
        """The first ("before") and the latest validation of the newest run; None where there is none."""
        entries = [entry for entry in self.read() if entry.stage == stage]
        mine = [entry for entry in entries if entry.run == entries[-1].run]
        return (mine[0], mine[-1]) if mine else None

    def _write(self, rows: list[dict[str, object]], names: list[str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        if self._keeps(names):
            text.write("" if self.path.read_bytes().endswith(b"\n") else "\n")  # a kill left half a row
        else:
            writer.writeheader()
        writer.writerows(rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())

    def _keeps(self, names: list[str]) -> bool:
        """Whether the file has these columns; one with others (another block size) is moved aside, not mixed up."""
        if not self.path.exists():
            return False
        with self.path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), []) == names:
                return True
        number = 1
        while (old := self.path.with_suffix(f".{number}.csv")).exists():
            number += 1
        self.path.rename(old)
        return False


def columns(tally: Tally) -> list[str]:
    """Every column of the file, the same whatever the numbers are."""
    survival = [f"survival/{k + 1}" for k in range(len(tally.at_risk))]
    return [*KEYS, *tally.ratios(), *survival, *SPREADS, *tally.counts()]


def _parse(row: dict[str, str | None]) -> tuple[tuple[int, int, str], str, Tally] | None:
    try:
        counts = {name: int(row[name] or "") for name in row if name in SINGLE}
        tails = {name: _numbered(row, name) for name in ("at_risk", "survived", "lengths")}
        key = int(row["run"] or ""), int(row["step"] or ""), row["stage"] or ""
        return key, row["domain"] or "", Tally(**counts, **tails)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError):
        return None


def _numbered(row: dict[str, str | None], name: str) -> tuple[int, ...]:
    return tuple(int(value or "") for key, value in row.items() if key.startswith(f"{name}/"))
