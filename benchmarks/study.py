"""Does on-policy distillation do what the paper says, on a real target? Every row is one command, and can be resumed.

    python benchmarks/study.py --data DATA --list                        # the rows
    python benchmarks/study.py --data DATA [ROW ...] [--runs DIR]        # train and measure rows; all that are missing
    python benchmarks/study.py --table                                   # what has been measured

DATA holds prompts/eval/*.jsonl (one file a domain) and rollouts/*.jsonl: the target's own greedy responses, one object a
line with id, domain, prompt_ids, response_ids and finish_reason, as `adaflash predict` writes them.

The responses are split once: one mix of domains trains the base drafter with DFlash's loss, the rest is for the methods
that are compared. Each method continues from that base for the same number of updates, trajectories and supervised blocks.
Then one and the same evaluation: prompts nobody trained on, a fixed seed, counts of rounds, so no figure depends on a
clock. A row's JSON (`docs/study/rows`) is written when it is complete, with the base it began from; it is done again if its
settings or its base have changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

ROWS = Path(__file__).parent.parent / "docs" / "study" / "rows"
BASE_SHARE = {"math": 0.75, "code": 0.3, "chat": 0.25}  # of each domain: the base has read much maths, little else
DOMAINS = {"gsm8k": "math", "humaneval": "code", "mt-bench": "chat"}
SEEDS = (0, 1, 2)
LONGEST = 96  # tokens of a response that any row learns from
LOSS = "adaflash.losses."
Tree = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One training run: an experiment of ours, what is changed in it, and how it samples."""

    name: str
    experiment: str
    changes: Tree = field(default_factory=dict)
    seed: int = 0
    temperature: float = 0.0
    scratch: bool = False  # begin from the target's layers, not from the base drafter
    domains: tuple[str, ...] = ()  # learns from these alone; (): from all
    of: str = ""  # trains nothing: this row's drafter, measured on longer responses


def rows(updates: int) -> list[Row]:
    """Headline rows first, then ablations of `adaflash` with one seed."""
    found = [
        Row(f"{method}-t{temperature:g}-s{seed}", method, seed=seed, temperature=temperature)
        for temperature in (0.0, 0.7)
        for seed in SEEDS
        for method in ("dflash", "osd", "adaflash")
    ]
    found += [Row(f"{method}-scratch", method, scratch=True) for method in ("dflash", "osd", "adaflash")]

    def ablation(name: str, **model: Any) -> None:
        found.append(Row(f"adaflash-{name}", "adaflash", {"model": model}))

    ablation("forward-kl", losses=[_term("TeacherCrossEntropy", 0.8), _term("ForwardKL", 0.2)])
    for threshold in (0.05, 0.2):
        ablation(f"clip-{threshold}", losses=_paper(0.2, clip="entry", threshold=threshold))
    ablation("clip-none", losses=_paper(0.2, clip="none"))
    ablation("clip-token", losses=_paper(0.2, clip="token"))
    for alpha in (0.0, 0.5, 1.0):
        ablation(f"alpha-{alpha:g}", losses=_paper(alpha, clip="entry", threshold=0.01))
    for mix in (0.0, 1.0):
        ablation(f"anchors-real-{mix:g}", anchor_mix=mix)
    for anchors in (8, 32):
        ablation(f"anchors-{anchors}", num_anchors=anchors)
    for reuse in (1, 2):
        found.append(Row(f"adaflash-reuse-{reuse}", "adaflash", {"data": {"reuse": reuse}}))
    drafts: Tree = {"model": {"rollout": {"init_args": {"teacher": "draft"}}}, "data": {"reuse": 1}}
    found.append(Row("adaflash-reuse-1-teacher-draft", "adaflash", drafts))
    muon = {"class_path": "adaflash.muon.MuonConfig", "init_args": {"muon_lr": 5e-3, "lr": 5e-4}}
    ablation("muon", optimizer=muon)
    for key, value in (("num_layers", 4), ("block_size", 16)):
        change = {"model": {"drafter": {"init_args": {key: value}}}}
        found.append(Row(f"adaflash-scratch-{key.replace('_', '-')}-{value}", "adaflash", change, scratch=True))
    for method in ("dflash", "adaflash"):  # a domain that nobody trained on, and longer responses than anybody saw
        found.append(Row(f"{method}-scratch-no-chat", method, scratch=True, domains=("math", "code")))
        found.append(Row(f"{method}-longer", method, of=f"{method}-t0-s0"))
    return found


def _term(name: str, weight: float, **init: Any) -> Tree:
    return {"class_path": LOSS + name, "init_args": {"weight": weight, "name": name.lower(), **init}}


def _paper(alpha: float, **clip: Any) -> list[Tree]:
    """(1 - alpha) teacher cross-entropy + alpha reverse KL."""
    terms = [_term("TeacherCrossEntropy", 1 - alpha)] if alpha < 1 else []
    return terms + ([_term("ReverseKL", alpha, **clip)] if alpha > 0 else [])


class Study:
    """Folders, budgets, the base drafter."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.data, self.runs = args, Path(args.data), Path(args.runs).resolve()
        self.split = self.runs / "data"

    def prepare(self) -> None:
        """Split the responses and train the base, each once."""
        self.split.mkdir(parents=True, exist_ok=True)
        lines = [line for path in sorted((self.data / "rollouts").glob("*.jsonl")) for line in path.open()]
        if not lines:
            raise SystemExit(f"{self.data / 'rollouts'}: no .jsonl of responses; `adaflash predict` writes them")
        for name, kept in split(lines).items():
            (self.split / f"{name}.jsonl").write_text("".join(kept))
        if not (self.runs / "base" / "config.json").is_file():
            self.fit("base", ["experiment/dflash"], self._overlay("base", self.args.base_updates, 32, 1e-3, 0))
            _run("export", "--checkpoint", self._last("base"), "--to", "adaflash", "--output", self.runs / "base")

    def settings(self, row: Row) -> Tree:
        """What makes the row what it is: the overlay that is laid over its experiment."""
        overlay = self._overlay(row.name, self.args.updates, 16, 1e-3 if row.scratch else 5e-4, row.seed)
        if row.experiment == "adaflash":
            overlay["model"]["length"] = {"class_path": "adaflash.length.survival.SurvivalLength"}
        if row.domains:
            overlay["data"]["train"] = [_source(self._only(row.domains), responses=True)]
        if row.experiment == "dflash" and row.temperature:
            overlay["data"]["train"] = [_source(self._sampled(row.temperature), responses=True)]
        rollout: Tree = {"max_new_tokens": LONGEST}
        if row.experiment != "dflash":
            rollout |= {"temperature": row.temperature, "lanes": 16, "warm_length": 4}
        overlay["model"]["rollout"] = {"init_args": rollout}
        if not row.scratch:
            overlay["model"]["drafter"]["init_args"]["checkpoint"] = str(self.runs / "base")
        return merged(overlay, row.changes)

    def do(self, row: Row) -> None:
        """Train and measure one row, unless its JSON is there."""
        if row.of:
            self.do(next(each for each in rows(self.args.updates) if each.name == row.of))
        overlay = self.settings(row)
        base = "" if row.scratch else fingerprint(self.runs / "base" / "model.safetensors")
        about = {"row": row.name, "experiment": row.experiment, "settings": self.portable(overlay)}
        evaluation = [self.args.prompts // 3, self.args.tokens * 4] if row.of else [self.args.prompts, self.args.tokens]
        about |= {"base": base, "evaluation": evaluation}
        path = Path(self.args.output) / f"{row.name}.json"
        if path.is_file() and about.items() <= json.loads(path.read_text()).items():
            print(f"{row.name}: measured already")
            return
        if not row.of:
            self.fit(row.name, [f"experiment/{row.experiment}"], overlay)
        requests = self.requests(row.temperature, *evaluation)
        write(path, about | evaluate(self._last(row.of or row.name), requests, self.args.lanes))
        print(f"{row.name}: {path}", flush=True)

    def portable(self, settings: Tree) -> Tree:
        """Settings without the folders of this machine."""
        folders = {"RUNS": self.runs, "DATA": self.data.resolve(), "TARGET": Path(self.args.target)}
        text = json.dumps(settings)
        for name, folder in folders.items():
            if folder.is_dir():
                text = text.replace(str(folder), name)
        return dict(json.loads(text))

    def requests(self, temperature: float, prompts: int, tokens: int) -> list[Any]:
        """The evaluation: the first prompts of each file, in the file's order."""
        from adaflash.data.rows import parse_row
        from adaflash.data.tokenizer import load_renderer
        from adaflash.types import Request

        renderer, found = load_renderer(self.args.target), []
        for path in sorted((self.data / "prompts" / "eval").glob("*.jsonl")):
            for i, line in enumerate(islice(path.open(), prompts)):
                prompt = renderer.prompt(parse_row(json.loads(line), str(i))).tokens
                domain = DOMAINS.get(path.stem, path.stem)
                found.append(Request(prompt, tokens, f"{path.stem}-{i}", domain, i, temperature))
        return found

    def fit(self, name: str, experiment: list[str], overlay: Tree) -> None:
        """`adaflash fit`, resumed where a killed one left a checkpoint."""
        config, text = self.runs / f"{name}.yaml", yaml.safe_dump(overlay, sort_keys=False)
        if config.is_file() and config.read_text() != text:
            shutil.rmtree(self.runs / "fits" / name, ignore_errors=True)  # of other settings: cannot be gone on with
        config.write_text(text)
        preset = [] if Path(self.args.target).is_dir() else [f"target/{self.args.target}"]
        words = [word for part in [*experiment, *preset, "trainer/cpu", config] for word in ("-c", part)]
        last = self.runs / "fits" / name / "checkpoints" / "last.ckpt"
        _run("fit", *words, *(["--ckpt_path", "last"] if last.exists() else []))

    def _last(self, name: str) -> Path:
        return self.runs / "fits" / name / "checkpoints" / "last.ckpt"

    def _overlay(self, name: str, updates: int, anchors: int, lr: float, seed: int) -> Tree:
        optimizer = {"lr": lr, "head_lr": 1e-3, "warmup": 10, "schedule": "cosine"}
        rows = self.split / ("base.jsonl" if name == "base" else "continue.jsonl")
        val = [
            _source(path, domain=DOMAINS.get(path.stem, path.stem))
            for path in sorted((self.data / "prompts" / "eval").resolve().glob("*.jsonl"))
        ]
        return {
            "run": str(self.runs / "fits" / name),
            "target": self.args.target,
            "seed_everything": seed,
            "model": {
                "seed": seed,
                "drafter": {"init_args": {"num_layers": 2, "block_size": 8, "num_context_layers": 5, "init": "target"}},
                "optimizer": {"class_path": "adaflash.optim.AdamWConfig", "init_args": optimizer},
                "num_anchors": anchors,
                "max_new_tokens": 32,
            },
            "data": {
                "batch_size": 4, "rollout_size": 16, "reuse": 4, "val_batch_size": 24, "val_prompts": 4,
                "train": [_source(rows, responses=True)], "val": val,
            },
            "trainer": {"max_steps": updates, "val_check_interval": updates // 2, "precision": "bf16-mixed"},
            "last": {"every_n_train_steps": 40},
        }  # fmt: skip

    def _only(self, domains: tuple[str, ...]) -> Path:
        """What a row learns from that knows some domains only."""
        path = self.split / f"continue-{'-'.join(domains)}.jsonl"
        lines = (self.split / "continue.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["domain"] in domains))
        return path

    def _sampled(self, temperature: float) -> Path:
        """The target's own samples for the same prompts: what a method learns from that does not roll out itself."""
        from adaflash.decoding.engine import Engine
        from adaflash.targets.hf import HFTarget
        from adaflash.types import Request

        path = self.split / f"sampled-{temperature:g}.jsonl"
        if not path.is_file():
            rows = [json.loads(line) for line in (self.split / "continue.jsonl").open()]
            requests = [
                Request(tuple(row["prompt_ids"]), LONGEST, row["id"], row["domain"], i, temperature)
                for i, row in enumerate(rows)
            ]
            print(f"{path}: {len(rows)} samples at temperature {temperature}", flush=True)
            done = Engine(HFTarget.load(self.args.target), lanes=self.args.lanes).generate(requests)
            found = [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in each.row().items()} for each in done]
            part = path.with_suffix(".part")
            part.write_text("".join(json.dumps(row) + "\n" for row in found))
            os.replace(part, path)
        return path


def split(lines: list[str]) -> dict[str, list[str]]:
    """Responses for the base and for what continues from it: the first `BASE_SHARE` of each domain, and the others."""
    domains = [json.loads(line)["domain"] for line in lines]
    parts: dict[str, list[str]] = {"base": [], "continue": []}
    for domain in sorted(set(domains)):
        own = [line for line, name in zip(lines, domains, strict=True) if name == domain]
        cut = int(len(own) * BASE_SHARE.get(domain, 0.5))
        parts["base"] += own[:cut]
        parts["continue"] += own[cut:]
    return parts


def evaluate(checkpoint: Path, requests: list[Any], lanes: int) -> Tree:
    """Counts under the full block, and under the policies the row has learnt."""
    from adaflash.bench.contenders import contenders
    from adaflash.decoding.engine import Engine
    from adaflash.decoding.stats import AcceptanceStats
    from adaflash.length.base import LengthPolicy
    from adaflash.length.fixed import FullBlock
    from adaflash.provenance import code_state
    from adaflash.run import load_run

    module = load_run(checkpoint)
    block, domains = module.drafter.block_size, {request.domain for request in requests}
    policies: dict[str, LengthPolicy] = {"full": FullBlock()}
    if any(True for _ in module.length.parameters()):  # learnt with the drafter
        policies["survival"] = module.length
        policies |= {each.name: each.make(block) for each in contenders(module, ["paper"])[0] if each.make}
    found, texts = {}, []
    for name, policy in policies.items():
        engine = Engine(module.target, module.drafter, policy, lanes=lanes, all_candidates=name == "full")
        done = engine.generate(requests)
        stats = AcceptanceStats(block, sorted(domains))
        stats.update(done)
        report = stats.report()
        tau = {domain: tally.numbers().get("tau") for domain, tally in report.tallies().items()}
        numbers = report.total.numbers()
        kept = {
            k: numbers.get(k) for k in ("tokens_per_pass", "verified_per_committed", "length/lost", "length/wasted")
        }
        found[name] = {"tau": tau, "spread": report.spreads(), "survival": report.total.survival(), **kept}
        texts.append([each.tokens.tolist() for each in done])
    differing = sum(one != other for text in texts[1:] for one, other in zip(texts[0], text, strict=True))
    return {
        "results": found,
        "texts_that_differ": differing,
        "requests": len(requests),
        "code": code_state(Path(__file__)),
    }


def table(folder: Path) -> str:
    """All rows as Markdown."""
    head = "| row | tau | math | code | chat | domain spread | position spread | verified per token | updates |"
    lines = [head, "|" + " --- |" * 9]
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        for policy, found in row["results"].items():
            name = row["row"] + ("" if policy == "full" else f", {policy}")
            taus = [found["tau"].get(key) for key in ("all", "math", "code", "chat")]
            spreads = [found["spread"].get(key) for key in ("domain_spread", "position_spread")]
            values = [*taus, *spreads, found["verified_per_committed"]]
            cells = ["" if value is None else f"{value:.3f}" for value in values]
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['settings']['trainer']['max_steps']} |")
    return "\n".join([*lines, "", *claims(folder)])


def claims(folder: Path) -> list[str]:
    """Methods against `dflash`, seed by seed: the mean of tau over domains, and its smallest and largest gain."""
    taus: dict[tuple[str, str], dict[str, float]] = {}
    for path in folder.glob("*-t*-s*.json"):
        method, temperature, seed = path.stem.rsplit("-", 2)
        found = json.loads(path.read_text())["results"]["full"]["tau"]
        taus.setdefault((temperature, method), {})[seed] = mean(v for k, v in found.items() if k != "all")
    lines = []
    for (temperature, method), found in sorted(taus.items()):
        rival = taus.get((temperature, "dflash"), {})
        gains = [found[seed] / rival[seed] - 1 for seed in sorted(found.keys() & rival.keys())]
        if gains and method != "dflash":
            each = ", ".join(f"{gain:+.1%}" for gain in gains)
            lines.append(f"- {method} against dflash at {temperature}: {mean(gains):+.1%} (by seed {each})")
    return lines


def merged(under: Tree, over: Tree) -> Tree:
    """`over` laid on `under`, key by key; lists are replaced."""
    both = dict(under)
    for key, value in over.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write(path: Path, content: Tree) -> None:
    """The whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def _source(path: Path, **init: Any) -> Tree:
    return {"class_path": "adaflash.data.sources.JsonlSource", "init_args": {"path": str(path), **init}}


def _run(*words: Any) -> None:
    if code := subprocess.run([sys.executable, "-m", "adaflash.cli", *map(str, words)]).returncode:
        raise SystemExit(f"adaflash {words[0]} ended with exit code {code}; the same command goes on from here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["*"], help="names or patterns, as in 'adaflash-clip-*'")
    parser.add_argument("--data", default="", help="folder with prompts/eval and rollouts")
    parser.add_argument("--runs", default="runs/study", help="runs, checkpoints and the base drafter")
    parser.add_argument("--output", default=str(ROWS), help="folder of the rows' JSON")
    parser.add_argument("--target", default="smollm2-135m", help="name of a preset, or folder of a target")
    parser.add_argument("--base_updates", type=int, default=1000)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=24, help="evaluation prompts a domain")
    parser.add_argument("--tokens", type=int, default=64, help="longest response of the evaluation")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    chosen = [row for row in rows(args.updates) if any(fnmatch(row.name, pattern) for pattern in args.rows)]
    if not chosen:
        parser.error(f"no row is called {' or '.join(args.rows)}; --list shows them")
    if args.list:
        print("\n".join(row.name for row in chosen))
    elif args.table:
        print(table(Path(args.output)))
    elif not args.data:
        parser.error("--data: the folder with prompts/eval and rollouts is needed")
    else:
        study = Study(args)
        study.prepare()
        for row in chosen:
            study.do(row)


if __name__ == "__main__":
    main()
