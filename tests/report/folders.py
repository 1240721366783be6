"""Run folders written by the code that writes real ones, with names and texts that try to break a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from adaflash.bench import drafts
from adaflash.bench.history import History
from adaflash.bench.reliability import write_rows
from adaflash.bench.rows import Rows
from adaflash.decoding.stats import Report
from adaflash.decoding.tally import Tally

EVIL = "<script>alert('x')</script> & \"quotes\""
POLICIES = {"plain": 1.0, "full": 0.8, "fixed": 1.1, "paper": 1.25}


def tally(rounds: int, survived: tuple[int, ...]) -> Tally:
    """All rounds sent three candidates; `survived[k]` of those at risk accepted candidate k + 1."""
    at_risk = (rounds, *survived[:2])
    accepted = sum(survived)
    return Tally(
        requests=4, rounds=rounds, plain_steps=rounds // 10, committed=rounds + accepted, verified=3 * rounds,
        accepted=accepted, labelled=rounds, lost=0, wasted=3 * rounds - accepted, at_risk=at_risk, survived=survived,
        lengths=(0, 0, 0, rounds),
    )  # fmt: skip


def added(parts: list[Tally]) -> Tally:
    """The tally of all of them."""
    values = {}
    for name in Tally.__dataclass_fields__:
        some = [getattr(part, name) for part in parts]
        values[name] = tuple(map(sum, zip(*some, strict=True))) if isinstance(some[0], tuple) else sum(some)
    return Tally(**values)


def validations(folder: Path, steps: dict[int, dict[str, tuple[int, ...]]]) -> None:
    """`acceptance.csv`: by update and domain, survivors of 100 rounds."""
    history = History(folder)
    for step, by_domain in steps.items():
        split = {name: tally(100, survived) for name, survived in by_domain.items()}
        history.append(step, "val", Report(added(list(split.values())), split))


def whole(folder: Path, target: str = "smollm2-135m", better: int = 0) -> Path:
    """A run that was trained, measured and benchmarked."""
    folder.mkdir(parents=True)
    config = {
        "seed_everything": 42, "target": target,
        "model": {"length": {"class_path": "adaflash.length.survival.SurvivalLength"},
                  "losses": [{"class_path": "adaflash.losses.ReverseKL", "init_args": {"weight": 0.2, "name": "rkl"}}]},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    validations(folder, {
        0: {"chat": (0, 0, 0), "math": (0, 0, 0)},
        100: {"chat": (20 + better, 5, 0), "math": (60, 30, 15)},
        200: {"chat": (30 + better, 10, 2), "math": (70, 42, 21)},
    })  # fmt: skip
    (folder / "metrics.csv").write_text("step,epoch,loss/rkl,val/length/error\n5,0,1.5,\n10,0,1.0,\n100,0,,0.7\n,,,\n")
    survival = torch.zeros(2, 3, 10, 3, dtype=torch.float64)
    survival[:, :, 2] = torch.tensor([100.0, 25.0, 30.0])
    survival[:, :, 7] = torch.tensor([20.0, 15.0, 12.0])
    write_rows(folder / "reliability.csv", 200, ["chat", "math"], survival)
    (folder / "gain.json").write_text(json.dumps(gain()))
    for load in (1, 4):
        for name, ratio in POLICIES.items():
            Rows(folder / "bench.jsonl").append(bench_row(name, load, ratio))
    rounds = [
        drafts.DraftedRound("\n", [" the", EVIL, " c"], 2, 1, 2, " own"),
        drafts.DraftedRound("a", [" x"], 1, 1, 2, ""),
    ]
    drafts.append(folder / drafts.FILE, [drafts.Sample(200, "chat", "id-1", EVIL, rounds)])
    (folder / "checkpoints").mkdir()
    told = {"config": yaml.safe_dump(config), "command": f"adaflash fit --x {EVIL}", "versions": {"torch": "2.13"},
            "code": {"adaflash": {"commit": "abc123", "clean": True}}, "seed": 42}  # fmt: skip
    (folder / "checkpoints" / "provenance.json").write_text(json.dumps(told))
    return folder


def gain() -> dict[str, Any]:
    """`gain.json`, as far as the report reads it."""
    overall = {
        "domain": "all", "ratio": 1.2, "interval": [1.1, 1.3], "verdict": "gain", "identical": 6, "prompts": 6,
        "parts": {"verify": 3.0, "draft": 0.5, "head": 0.25, "prefill": 0.25}, "tau_break_even": 1.4, "tau_measured": 1.7,
    }  # fmt: skip
    return {"policy": "SurvivalLength(threshold=0.3)", "load": 0.4, "cores": 2, "domains": [overall]}


def bench_row(name: str, load: int, ratio: float) -> dict[str, Any]:
    """A row of `adaflash bench`, as far as the report reads it."""
    key = {"checkpoint": "c0ffee", "set": "validation", "load": load, "policy": name}
    return {
        "key": key, "policy": name, "described": name.title(), "load": load, "ratio": ratio / load**0.2, "band": 0.04,
        "interval": [ratio / load**0.2 - 0.05, ratio / load**0.2 + 0.05],
        "modelled_ratio": None if name == "plain" else ratio,
        "numbers": {"tau": 1.7, "verified_per_committed": 1.5}, "drafted": {"decode": 20.0 * ratio * load**0.5},
        "window": {"plain": 20.0, "drafted": 21.0 * ratio * load**0.5}, "verdict": "A/A" if name == "plain" else "gain",
        "identical": 6, "prompts": 6, "differing": [], "parts": {"verify": 2.0, "draft": 1.0},
        "machine": {"contended": name == "full", "others": 0.5},
    }  # fmt: skip
