"""What the choice of a length is worth on the real target: counts first, then wall ratios of one run.

    python benchmarks/length.py --checkpoint runs/mine             # a run, a .ckpt or a drafter's folder
    python benchmarks/length.py --quick --json                     # few tokens; the last line is JSON

For each load (requests decoded at once, three domains mixed): plain decoding, the full block, the best fixed length, the
paper's head at rate 1.3, survival + cost with the fall-back to plain steps off and on, and without --quick survival +
cost with vocabulary features.

The heads learn first, alone, on rollouts of the frozen drafter over training prompts. The best fixed length is chosen by
counts x cost table on prompts that are not reported. Then all ways take turns, forwards and backwards, group by group; a
ratio is that of the sums of each group's median decoding seconds (texts are the same, and compared), its interval a
bootstrap over groups, and `noise` what the first and the last plain runs differ by. `modelled` ratios are counts x cost
table: free of the machine's noise, and of its host time; `drift` is how much more the clock shows than the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch

from adaflash.bench.booked import Booked, plain_seconds
from adaflash.bench.cost import measure, widths_of
from adaflash.bench.cost_command import show
from adaflash.bench.interval import bootstrap
from adaflash.bench.runs import Run, decode
from adaflash.blocks import anchor_range, build_blocks, context_rows
from adaflash.data.rows import parse_row
from adaflash.data.tokenizer import load_renderer
from adaflash.decoding.engine import Engine
from adaflash.decoding.tally import Tally, count
from adaflash.drafters.base import Drafter, embed_blocks
from adaflash.drafters.dflash import DFlash
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import LengthPolicy, Outcome
from adaflash.length.cost_aware import CostAware
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request, Segments, Trajectory

QUICKSTART = "runs/quickstart/checkpoints/last.ckpt"
SHIPPED = Path(__file__).parent.parent / "adaflash" / "data" / "shipped"


@dataclass
class Way:
    """One way to decode, and its runs: a list of repeats for each group."""

    name: str
    engine: Engine
    booked: Booked | None
    runs: list[list[Run]] = field(default_factory=list)
    modelled: float = 0.0
    cpu: dict[int, float] = field(default_factory=dict)  # least processor seconds of each group, prefill included

    def play(self, group: int, requests: Sequence[Request]) -> None:
        before = self.booked.seconds if self.booked else 0.0
        start = time.process_time()
        run = decode(self.engine, requests)
        used = time.process_time() - start
        self.cpu[group] = min(used, self.cpu.get(group, used))
        while len(self.runs) <= group:
            self.runs.append([])
        if not self.runs[group] and self.booked:
            self.modelled += self.booked.seconds - before
        self.runs[group].append(run)

    def seconds(self, groups: Sequence[int]) -> float:
        return sum(median(run.decoding for run in self.runs[g]) for g in groups)

    def tally(self, block_size: int) -> Tally:
        sums = [count(each, block_size) for runs in self.runs for each in runs[0].trajectories]
        return Tally.from_vector(torch.stack(sums).sum(0), block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument(
        "--checkpoint",
        default=QUICKSTART if Path(QUICKSTART).is_file() else "",
        help="run folder, .ckpt or drafter folder (default: the quickstart's, where it has been run); '': untrained",
    )
    parser.add_argument("--prompts", default=str(SHIPPED), help="folder with train/ and eval/ of JSONL files")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=0, help="longest response; 0: 96, or 16 with --quick")
    parser.add_argument("--groups", type=int, default=0, help="groups of requests a load; 0: 4, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="few tokens, one group a load")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    args = parser.parse_args()
    args.tokens, args.groups = args.tokens or (16 if args.quick else 96), args.groups or (1 if args.quick else 4)
    print(f"drafter: {args.checkpoint or 'untrained'}", flush=True)
    print(json.dumps(Bench(args).run()) if args.json else Bench(args).run())


class Bench:
    """Target, drafter, cost table and heads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target, self.drafter = load(args.target, args.checkpoint)
        self.block = self.drafter.block_size
        self.costs = measure(
            self.target, self.drafter, None, sorted({1, *args.loads}), (64, 256), 3 if args.quick else 7
        )
        show(self.costs)
        self.train, self.eval = (prompts(args.target, Path(args.prompts) / part) for part in ("train", "eval"))
        self.paper, self.cost = AdaptiveLength(), CostAware(fall_back=False)
        self.features = CostAware(fall_back=False, vocab_features=True)
        learners = [self.paper, self.cost] + ([] if args.quick else [self.features])
        warm_up(learners, self.target, self.drafter, self._requests(self.train, 12 if args.quick else 36), args.quick)

    def run(self) -> dict[str, Any]:
        """Every load; the numbers of survival + cost in the JSON."""
        loads = {str(load): self.load(load) for load in self.args.loads}
        return {
            "loads": loads, "block_size": self.block, "tokens": self.args.tokens, "groups": self.args.groups,
            "checkpoint": self.args.checkpoint, "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0],
        }  # fmt: skip

    def load(self, load: int) -> dict[str, Any]:
        """One row of the report."""
        tune = self._requests(self.train[100:], load)
        best = self._best_fixed(load, tune)
        ways = self._ways(load, best)
        for way in ways.values():
            decode(way.engine, tune)  # warm-up: caches, and the books of survival + cost
        # The next prompts each time; where they are used up, from the start again.
        groups = [self._requests((self.eval * 9)[load * g % len(self.eval) :], load) for g in range(self.args.groups)]
        for g, requests in enumerate(groups):
            for way in [*ways.values(), *reversed(ways.values())]:
                way.play(g, requests)
            print(f"{load} requests: group {g + 1} of {self.args.groups}", flush=True)
        return self._row(load, best, ways, differing(ways))

    def _requests(self, some: Sequence[tuple[str, tuple[int, ...]]], number: int) -> list[Request]:
        return [Request(tokens, self.args.tokens, str(i), name) for i, (name, tokens) in enumerate(some[:number])]

    def _best_fixed(self, load: int, tune: Sequence[Request]) -> int:
        """The length with the least modelled seconds on prompts of its own."""
        found = {}
        for length in [width - 1 for width in widths_of(self.block)[1:]]:
            booked = Booked(FixedLength(length), self.costs)
            Engine(self.target, self.drafter, booked, lanes=load).generate(tune)
            found[length] = booked.seconds
        return min(found, key=found.__getitem__)

    def _ways(self, load: int, best: int) -> dict[str, Way]:
        on = CostAware(fall_back=True)
        on.build(self.target.hidden_size, self.block)
        on.load_state_dict(self.cost.state_dict())
        policies: dict[str, LengthPolicy] = {
            "full": FullBlock(), "best_fixed": FixedLength(best), "paper": self.paper, "cost": self.cost,
            "cost_or_plain": on,
        }  # fmt: skip
        if not self.args.quick:
            policies["cost_features"] = self.features
        ways = {"plain": Way("plain", Engine(self.target, lanes=load), None)}
        for name, policy in policies.items():
            booked = Booked(policy, self.costs)
            ways[name] = Way(name, Engine(self.target, self.drafter, booked, lanes=load), booked)
        return ways

    def _row(self, load: int, best: int, ways: dict[str, Way], differing: int) -> dict[str, Any]:
        """Prints all ways of a load and returns what the JSON says of it."""
        rows = {name: self._numbers(way, ways) for name, way in ways.items()}
        print(f"\n{load} requests, best fixed length {best}; texts that differ: {differing}")
        for name, row in rows.items():
            print(f"  {name:14}" + "  ".join(f"{key} {_short(value)}" for key, value in row.items()))
        cost, on, fixed, plain = (ways[n] for n in ("cost", "cost_or_plain", "best_fixed", "plain"))
        plain.modelled = sum(plain_seconds(self.costs, runs[0].trajectories) for runs in plain.runs)
        noise = abs(_part(plain, 0) / _part(plain, -1) - 1)
        return {
            "tau": rows["cost"]["tau"], "verified_per_committed": rows["cost"]["verified_per_committed"],
            "vs_full_block": ratio(ways["full"], cost), "vs_best_fixed": ratio(fixed, cost), "vs_plain": ratio(plain, on),
            "pays": ratio(plain, fixed) > 1, "best_fixed": best, "best_fixed_vs_plain": ratio(plain, fixed),
            "intervals": {
                "vs_full_block": interval(ways["full"], cost), "vs_best_fixed": interval(fixed, cost),
                "vs_plain": interval(plain, on),
            },
            "modelled": {
                "vs_full_block": ways["full"].modelled / cost.modelled, "vs_best_fixed": fixed.modelled / cost.modelled,
                "vs_plain": plain.modelled / on.modelled,
                "best_fixed_vs_plain": plain.modelled / fixed.modelled,
            },
            "cpu": {
                "vs_full_block": cpu_ratio(ways["full"], cost), "vs_best_fixed": cpu_ratio(fixed, cost),
                "vs_plain": cpu_ratio(plain, on), "best_fixed_vs_plain": cpu_ratio(plain, fixed),
            },
            "drift": cost.seconds(range(len(cost.runs))) / cost.modelled,
            "plain_share": rows["cost_or_plain"]["plain_share"], "noise": noise, "differing": differing,
            "break_even_tau": self.costs.break_even(best, load, 128),
        }  # fmt: skip

    def _numbers(self, way: Way, ways: dict[str, Way]) -> dict[str, Any]:
        tally = way.tally(self.block)
        numbers = tally.numbers()
        kept = {name: numbers.get(name) for name in ("tau", "verified_per_committed", "plain_share")}
        lengths = {length: n for length, n in enumerate(tally.lengths) if n}
        return {**kept, "lengths": lengths, "vs_plain": ratio(ways["plain"], way)}


def ratio(slow: Way, fast: Way) -> float:
    """How many times faster: seconds of one over those of the other, same texts."""
    groups = range(len(slow.runs))
    return slow.seconds(groups) / fast.seconds(groups)


def cpu_ratio(slow: Way, fast: Way) -> float:
    """The same in processor seconds: for machines that others use too, and targets on the CPU."""
    return sum(slow.cpu.values()) / sum(fast.cpu.values())


def interval(slow: Way, fast: Way) -> tuple[float, float] | None:
    """95 % of the ratio, by bootstrap over groups; None for fewer than three."""
    return bootstrap(range(len(slow.runs)), lambda groups: slow.seconds(groups) / fast.seconds(groups))


def _part(way: Way, which: int) -> float:
    return sum(runs[which].decoding for runs in way.runs)


def differing(ways: dict[str, Way]) -> int:
    """Texts that are not plain decoding's; must be none (near ties in floating point aside)."""
    texts = {name: [t.tokens.tolist() for runs in way.runs for t in runs[0].trajectories] for name, way in ways.items()}
    return sum(one != other for name in texts for one, other in zip(texts["plain"], texts[name], strict=True))


def load(name: str, checkpoint: str) -> tuple[HFTarget, Drafter]:
    """Target and drafter."""
    if checkpoint and not (Path(checkpoint) / "config.json").is_file():
        from adaflash.run import load_run

        module = load_run(checkpoint)
        return module.target, module.drafter
    target = HFTarget.load(name, TargetOptions(dtype="auto"))
    if not checkpoint:
        print("no --checkpoint: an untrained drafter with blocks of 4; drafting cannot pay")
    drafter = (
        DFlash(num_layers=2, block_size=4)
        if not checkpoint
        else DFlash(block_size=_size(checkpoint), checkpoint=checkpoint)
    )
    drafter.build(target, "<empty_output>")
    return target, drafter.eval()


def _size(folder: str) -> int:
    config = json.loads((Path(folder) / "config.json").read_text())
    return int(config.get("block_size") or config["dflash_config"]["block_size"])


def prompts(target: str, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """(domain, ids) of a folder's prompts, files in turn."""
    renderer = load_renderer(target)
    files = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
    rows = [
        (path.stem, line) for path, lines in zip(sorted(folder.glob("*.jsonl")), files, strict=True) for line in lines
    ]
    by_file = [[row for row in rows if row[0] == path.stem] for path in sorted(folder.glob("*.jsonl"))]
    turns = [row for turn in zip_longest(*by_file) for row in turn if row is not None][:400]
    return [(name, renderer.prompt(parse_row(json.loads(line), str(i))).tokens) for i, (name, line) in enumerate(turns)]


def warm_up(
    learners: Sequence[LengthPolicy], target: HFTarget, drafter: Drafter, requests: Sequence[Request], quick: bool
) -> None:
    """The paper's initialisation stage: heads learn alone, on rollouts over training prompts."""
    rollouts = Engine(target, drafter, FixedLength(2), lanes=12, keep_states=True).generate(requests)
    with torch.no_grad():
        outcomes = [outcome_of(each, target, drafter) for each in rollouts if len(each.response) > 2]
    for learner in learners:
        learner.build(target.hidden_size, drafter.block_size)
        optimizer = torch.optim.AdamW(learner.parameters(), 1e-3, weight_decay=0.01)
        for _ in range(4 if quick else 12):
            for outcome in outcomes:
                optimizer.zero_grad()
                loss = learner.loss(outcome)
                assert loss is not None
                (loss / learner.counted(outcome).sum().clamp(min=1)).backward()
                optimizer.step()
        learner.eval()
    survivors = torch.cat([o.accepted[o.labelled] for o in outcomes])
    print(f"heads learnt from {len(survivors)} blocks, {float(survivors.mean()):.2f} candidates accepted on average")


def outcome_of(text: Trajectory, target: HFTarget, drafter: Drafter) -> Outcome:
    """All blocks of one trajectory beside it."""
    valid = anchor_range(text.prompt_length, len(text.tokens))
    blocks = build_blocks([text], [torch.arange(valid.start, valid.stop)], drafter.block_size, drafter.mask_id)
    rows = context_rows(len(text.tokens))
    assert text.context is not None
    hidden = drafter(
        embed_blocks(target, blocks.tokens, torch.float32), blocks, text.context[:rows], Segments.whole([rows])
    )
    agreed = (target.head(hidden[:, 1:]).argmax(-1) == blocks.labels) & blocks.supervised
    accepted = agreed.long().cumprod(1).sum(1).float()
    return Outcome(hidden.detach(), accepted, blocks.full, agreed, blocks.supervised, target.head)


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
