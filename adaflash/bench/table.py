"""The table at the end: what the drafter gains, per domain, and what was active while it was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from adaflash.bench.gain import GainRow
from adaflash.bench.history import Entry
from adaflash.decoding.stats import OVERALL

WIDTH = 110  # columns that every cell of the table fits into


@dataclass(frozen=True)
class Gain:
    """One measurement with its circumstances."""

    rows: list[GainRow]
    policy: str
    group_size: int
    max_new_tokens: int
    before: Entry | None = None  # first validation of the run
    now: Entry | None = None  # latest
    load: float = 0.0  # load average of the machine when measuring began
    cores: int = 1

    def tau(self, entry: Entry | None, domain: str) -> float | None:
        """Tau of a validation; None where there is none."""
        return entry.tallies[domain].numbers().get("tau") if entry and domain in entry.tallies else None

    def as_json(self) -> dict[str, object]:
        """Everything the table rests on, for `gain.json`."""
        rows = [self._row_as_json(row) for row in self.rows]
        return {
            "policy": self.policy,
            "requests_at_once": self.group_size,
            "max_new_tokens": self.max_new_tokens,
            "load": self.load,
            "cores": self.cores,
            "step_before": self.before.step if self.before else None,
            "step_now": self.now.step if self.now else None,
            "domains": rows,
        }

    def _row_as_json(self, row: GainRow) -> dict[str, object]:
        fields = asdict(row)
        counts = fields.pop("tally")
        derived = {"verdict": row.verdict, "tau_measured": row.tau, "tau_break_even": row.break_even_tau}
        taus = {"tau_before": self.tau(self.before, row.domain), "tau_now": self.tau(self.now, row.domain)}
        return {**fields, **derived, **taus, "numbers": row.tally.numbers(), "counts": counts}


def render(gain: Gain) -> RenderableType:
    """The table, then one line per domain that says what was active and, where there is no gain, what it would take."""
    steps = f"step {gain.before.step} -> {gain.now.step}" if gain.before and gain.now else "no validation recorded"
    title = f"Drafter against plain decoding ({steps}, {gain.group_size} at once, {gain.max_new_tokens} new tokens)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("domain")
    for name in ("tau before -> now", "plain tok/s", "drafted tok/s", "ratio", "identical"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in gain.rows:
        if row.domain == OVERALL:
            table.add_section()
        table.add_row(*_cells(gain, row))
    return Lines(table, *(Text(line) for line in _notes(gain)))


def _cells(gain: Gain, row: GainRow) -> list[str | Text]:
    style = {"gain": "bold green", "no gain": "bold red"}.get(row.verdict, "yellow")
    return [
        row.domain,
        _change(gain.tau(gain.before, row.domain), gain.tau(gain.now, row.domain), row.tau),
        _number(row.plain.decode, ".1f"),
        _number(row.drafted.decode, ".1f"),
        _number(row.ratio) + (f" [{row.interval[0]:.2f}, {row.interval[1]:.2f}]" if row.interval else ""),
        Text(f"{row.identical}/{row.prompts}", style="" if row.identical == row.prompts else "bold red"),
        Text(row.verdict, style=style),
    ]


def _change(before: float | None, now: float | None, measured: float | None) -> str:
    if before is None or now is None:
        return f"- -> {_number(now if now is not None else measured)}"
    return f"{before:.2f} -> {now:.2f} ({now - before:+.2f})"


def _notes(gain: Gain) -> list[str]:
    notes = [f"Active: {gain.policy}", *(f"  {_active(row)}" for row in gain.rows)]
    notes += [_missing(row) for row in gain.rows if row.verdict == "no gain"]
    notes += [
        f"{row.domain}: within the noise of this machine ({row.noise or 0:.0%} plain against plain); measure longer"
        for row in gain.rows
        if row.verdict == "unclear"
    ]
    if gain.load > 1.5 * gain.cores:
        notes.append(
            f"The machine was busy (load {gain.load:.1f} on {gain.cores} cores): trust the counts, not the speeds"
        )
    total = gain.rows[-1]
    notes += [
        f"NOT IDENTICAL: {found['id']} ({found['domain']}) differs from plain decoding at response token {found['position']}"
        for found in total.differing
    ]
    notes += [f"not served: {found['id']} ({found['domain']}): {found['error']}" for found in total.failed]
    return [*notes, _boundaries(total)]


def _active(row: GainRow) -> str:
    """Length chosen: mean and histogram; share of plain steps."""
    numbers = row.tally.numbers()
    lengths = " ".join(f"{length}:{n}" for length, n in enumerate(row.tally.lengths) if n)
    plain = numbers.get("plain_share", 0.0)
    mean = _number(numbers.get("length/mean"))
    return f"{row.domain}: mean L {mean} ({lengths or 'nothing drafted'}), plain steps {plain:.0%}"


def _missing(row: GainRow) -> str:
    """What it would take."""
    if row.break_even_tau is None:
        return f"{row.domain}: no gain; nothing was drafted"
    block = len(row.tally.lengths)
    beyond = f", more than a block of {block} can give: a round must get cheaper" if row.break_even_tau > block else ""
    return (
        f"{row.domain}: no gain at tau {_number(row.tau)} (measured here); breaks even at tau "
        f"{row.break_even_tau:.2f}, if a round costs what it costs now{beyond}"
    )


def _boundaries(row: GainRow) -> str:
    """What the seconds include, and where they went."""
    prefill = f"{row.plain.prefill_seconds:.2f} s plain, {row.drafted.prefill_seconds:.2f} s drafted"
    return (
        f"Speeds are decode-only; with prefill ({prefill}) the ratio is {_number(row.end_to_end_ratio)}. "
        f"Time of the drafted runs: {_parts(row)}."
    )


def _parts(row: GainRow) -> str:
    total = sum(row.parts.values()) or 1.0
    shares = sorted(row.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares) or "not known"


def _number(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)
