"""The first thing on the page: what each run was, and what it brought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from adaflash.bench.history import Entry
from adaflash.decoding.stats import OVERALL
from adaflash.decoding.stats import Report as Stats
from adaflash.report.figure import Table, interval, number
from adaflash.report.reading import Run
from adaflash.report.speed import overall

COLUMNS = (
    "run", "active policy", "loss", "updates", "tau before → now", "domain spread", "position spread", "mean L, plain steps",
    "speed ratio [95\u00a0%]", "verdict", "same text", "load / cores",
)  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """One run in a sentence and a few numbers."""

    run: str
    tau_before: str
    tau: str
    ratio: str
    interval: str
    verdict: str
    updates: str
    says: str


def headline(run: Run) -> Headline:
    """Tau and speed; what is not there is a dash."""
    before, now = _taus(run)
    gain = overall(run)
    ratio, updates = gain.get("ratio"), str(run.validations[-1].step) if run.validations else "–"
    verdict = str(gain.get("verdict", "not measured"))
    said = {
        "gain": "Drafting pays here.",
        "no gain": _what_it_takes(gain),
        "unclear": "Within the noise of the machine: measure longer.",
    }.get(verdict, "Speed was not measured.")
    changed = number(before) if len(run.validations) > 1 else "–"
    return Headline(
        run.name, changed, number(now), number(ratio), interval(gain.get("interval")).strip(), verdict, updates, said
    )


def summary(runs: Sequence[Run]) -> Table:
    """A row a run."""
    return Table(COLUMNS, [_row(run) for run in runs])


def warnings(runs: Sequence[Run]) -> list[str]:
    """What makes these runs hard to compare."""
    told = []
    for what, values in (("targets", {run.name: run.target for run in runs}), ("block sizes", _blocks(runs))):
        known = {name: value for name, value in values.items() if value}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in known.items())
            told.append(f"These runs have different {what} ({listed}): compare ratios, not tau or tokens per second.")
    return told


def provenance(run: Run) -> Table:
    """Where a run comes from, a row a fact."""
    facts: list[tuple[str, str]] = [("folder", str(run.folder)), ("target", run.target or "–")]
    for name, value in run.origin.items():
        if name not in ("config", "made_for", "path"):
            facts += _flat(name, value)
    facts += _flat("made for", run.origin.get("made_for") or {})
    if (seed := run.config.get("seed_everything")) is not None and "seed" not in run.origin:
        facts.append(("seed", str(seed)))
    return Table(("fact", "value"), facts)


def config_text(run: Run) -> str:
    """The whole config as YAML."""
    return yaml.safe_dump(run.config, sort_keys=False) if run.config else ""


def _row(run: Run) -> tuple[str, ...]:
    before, now = _taus(run)
    gain, spreads = overall(run), _spreads(run.validations[-1]) if run.validations else {}
    total = run.validations[-1].tallies[OVERALL].numbers() if run.validations else {}
    same = f"{gain['identical']}/{gain['prompts']}" if "prompts" in gain else "–"
    load = f"{run.gain['load']:.1f} / {run.gain['cores']}" if "load" in run.gain else "–"
    tau = f"{number(before)} → {number(now)}" if len(run.validations) > 1 else number(now)
    return (
        run.name, _policy(run), _losses(run), str(run.validations[-1].step) if run.validations else "–", tau,
        number(spreads.get("domain_spread"), ".3f"), number(spreads.get("position_spread"), ".3f"),
        f"{number(total.get('length/mean'))}, {number(total.get('plain_share'), '.0%')}",
        number(gain.get("ratio")) + interval(gain.get("interval")),
        str(gain.get("verdict", "not measured")), same, load,
    )  # fmt: skip


def _taus(run: Run) -> tuple[float | None, float | None]:
    ends = [run.validations[0], run.validations[-1]] if run.validations else []
    before, now = ([entry.tallies[OVERALL].numbers().get("tau") for entry in ends] + [None, None])[:2]
    return before, now


def _spreads(entry: Entry) -> dict[str, float]:
    by_domain = {name: tally for name, tally in entry.tallies.items() if name != OVERALL}
    return Stats(entry.tallies[OVERALL], by_domain).spreads()


def _policy(run: Run) -> str:
    """As it said itself when it was measured; else what the config names."""
    if run.gain.get("policy"):
        return str(run.gain["policy"])
    named = run.model.get("length")
    return str(named.get("class_path", "")).rpartition(".")[2] or "–" if isinstance(named, dict) else "–"


def _losses(run: Run) -> str:
    terms = [each.get("init_args") or {} for each in run.model.get("losses") or [] if isinstance(each, dict)]
    return " + ".join(f"{term.get('weight', 1):g} {term.get('name', '?')}" for term in terms) or "–"


def _blocks(runs: Sequence[Run]) -> dict[str, int]:
    tallies = {run.name: run.validations[-1].tallies[OVERALL] for run in runs if run.validations}
    return {name: len(tally.lengths) for name, tally in tallies.items()}


def _what_it_takes(gain: dict[str, Any]) -> str:
    even, tau = gain.get("tau_break_even"), gain.get("tau_measured")
    if not even:
        return "Nothing was drafted."
    return f"It breaks even at tau {even:.2f} (measured: {number(tau)}), if a round costs what it costs now."


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    """Nested facts as `outer inner`, lists as JSON."""
    if isinstance(value, dict):
        return [fact for key, each in value.items() for fact in _flat(f"{name} {key}", each)]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str))]
