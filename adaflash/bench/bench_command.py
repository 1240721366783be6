"""`adaflash bench`: plain, full block, fixed, paper and survival + cost over prompt sets and loads."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaflash.bench.bench_table import WIDTH, render
from adaflash.bench.cells import Scale, band_of, verdict
from adaflash.bench.contenders import NAMES, contenders
from adaflash.bench.cost import measure, widths_of
from adaflash.bench.plan import Cell, cells_of, plan, stages_of
from adaflash.bench.prompt_sets import PromptSet, from_files, of_run
from adaflash.bench.rows import FILE, Row, Rows
from adaflash.data.tokenizer import load_renderer
from adaflash.errors import UserError
from adaflash.length.cost_table import CostTable, find, fingerprint, place
from adaflash.module import AdaFlashModule
from adaflash.run import best_device, find_checkpoint, load_run, origin

METHOD = """Every policy takes turns with plain decoding, group by group (plain, policy, policy, plain), after a warm-up; the
plain row is plain decoding against itself and says what this machine calls equal. Counts (tau, verified per committed)
are free of noise and come first; a ratio is that of decode-only speeds, with a bootstrap interval over groups of prompts;
`modelled` is counts x cost table. The text of every run is compared with plain decoding's. Each cell is one row of
bench.jsonl in the run folder; cells that are there are not measured again. Exit status 1: some text was not the same.

policies:
""" + "\n".join(f"  {name:14} {what}" for name, what in NAMES.items())
QUICK = {"loads": [1, 4], "max_new_tokens": 10, "num_prompts": 3}
USUAL = {"loads": [1, 4, 16, 32], "max_new_tokens": 64, "num_prompts": 24}


def main(words: Sequence[str]) -> int:
    """The command line."""
    args = _arguments(words)
    module, told = load_run(args.checkpoint, args.target, best_device()), origin(args.checkpoint)
    torch.set_grad_enabled(False)
    _place(module, args.device)
    rows = Rows(Path(args.output) if args.output else _folder(Path(args.checkpoint)) / FILE)
    rows.check_writable()
    sets = _sets(args, module, told["config"])
    playable, missing = contenders(module, args.policies)
    costs, lines = _costs(module, args)
    lines += [f"{name}: not measured, {why}" for name, why in missing.items()]
    scale = Scale(args.max_new_tokens, args.num_prompts, args.rounds)
    stages, skipped = stages_of(module, costs, sets, args.loads, scale)
    cells = cells_of(stages, playable, find_checkpoint(Path(args.checkpoint)), _lengths(args, module))
    lines += skipped
    if not cells:
        raise UserError(f"nothing to measure: {'; '.join(skipped)}. Give more --prompts, or smaller --loads")
    found = _run(cells, rows, args, {"step": told["step"], "checkpoint": told["path"], "target": module.target_name})
    console = Console()
    if not console.is_terminal:  # a file has no edge to wrap at
        console.width = max(console.width, WIDTH)
    console.print(render(found, lines))
    console.print(f"rows: {rows.path}", soft_wrap=True)
    return int(any(row["differing"] for row in found))


def _arguments(words: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        "adaflash bench",
        description=f"Measure a trained drafter.\n\n{METHOD}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", required=True, help="a checkpoint of `adaflash fit`, or the folder of a run")
    parser.add_argument("--target", default="", help="where the target is now, if not where the run had it")
    parser.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE", help="JSONL prompt sets; none: the run's own"
    )
    parser.add_argument(
        "--policies", nargs="+", default=[], metavar="NAME", help="none: all that the checkpoint can play"
    )
    parser.add_argument("--loads", type=int, nargs="+", metavar="N", help="requests at once (1 4 16 32)")
    parser.add_argument(
        "--fixed", type=int, nargs="+", metavar="L", help="fixed lengths to choose from (1 2 3 5 7 ...)"
    )
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help="longest response (64)")
    parser.add_argument("--num_prompts", type=int, metavar="N", help="prompts a load, at least 3 groups of it (24)")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="repeats of plain, policy, policy, plain (1)"
    )
    parser.add_argument(
        "--device", default="", metavar="NAME", help="cuda, cpu, ... (the accelerator, if there is one)"
    )
    parser.add_argument("--output", default="", metavar="FILE", help="rows go here (bench.jsonl in the run folder)")
    parser.add_argument("--again", action="store_true", help="measure cells anew that have a row already")
    parser.add_argument(
        "--quick", action="store_true", help="loads 1 4, few prompts, 10 tokens: minutes, wide intervals"
    )
    args = parser.parse_args(list(words))
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(*args.loads, *(args.fixed or [1]), args.max_new_tokens, args.num_prompts, args.rounds) < 1:
        raise UserError("--loads, --fixed, --max_new_tokens, --num_prompts and --rounds are positive numbers")
    args.loads = sorted(set(args.loads))
    return args


def _folder(checkpoint: Path) -> Path:
    """The run folder of a checkpoint."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder


def _place(module: AdaFlashModule, name: str) -> None:
    """Target, drafter and policy on one device."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        device = torch.device(name) if name else found or torch.device("cpu")
        module.target.to(device)
        module.to(device)
    except (RuntimeError, AssertionError) as error:  # a name torch does not know, or a device it was not built for
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None


def _sets(args: Namespace, module: AdaFlashModule, config: dict[str, Any]) -> list[PromptSet]:
    if not args.prompts:
        return [of_run(config, module.target_name)]
    switches = config.get("data", {}).get("template_kwargs") or {}
    return from_files(args.prompts, load_renderer(module.target_name, switches))


def _costs(module: AdaFlashModule, args: Namespace) -> tuple[CostTable, list[str]]:
    """The cost table of this machine, measured first if there is none; a quick one is not kept."""
    if place(fingerprint(module.target, module.drafter)).is_file():
        table, stale = find(module.target, module.drafter)
        busy = f"measured at load {table.about.get('load_average', 0):.1f}"
        return table, [f"modelled by the cost table kept for this machine ({busy})", *([stale] if stale else [])]
    _say("no cost table for this machine yet: measuring one first")
    contexts, rounds = ((128,), 3) if args.quick else ((64, 256), 7)
    table = measure(module.target, module.drafter, module.length, sorted({1, *args.loads}), contexts, rounds)
    if args.quick:
        return table, ["modelled by a quick cost table that was not kept; `adaflash cost` measures one to keep"]
    table.save(place(table.fingerprint))
    return table, ["modelled by a cost table measured just now, and kept"]


def _lengths(args: Namespace, module: AdaFlashModule) -> list[int]:
    """The fixed lengths that are tried."""
    block = module.drafter.block_size
    return sorted({min(each, block - 1) for each in args.fixed or [width - 1 for width in widths_of(block)[1:]]})


def _run(cells: Sequence[Cell], rows: Rows, args: Namespace, about: Row) -> list[Row]:
    """Measure what has no row yet, behind a progress bar; every cell's row, in order."""
    todo = [cell for cell in cells if args.again or rows.done(cell.key) is None]
    _say(plan(cells, todo))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("warming up", total=sum(cell.groups for cell in todo))
        for number, cell in enumerate(todo, start=1):
            name = f"{cell.contender.name}, {cell.stage.load} at once, {cell.key['set']}"
            bar.update(task, description=f"{number} of {len(todo)}: {name}")
            cell.stage.tell = lambda done: bar.advance(task)
            measured = {"key": cell.key, **about, **cell.stage.measure(cell.contender, cell.key.get("fixed", ()))}
            rows.append(_judged(measured, rows))
            if not console.is_terminal:
                _say(
                    f"{number} of {len(todo)}: {name}: ratio {measured['ratio'] or 0:.2f}, {measured['seconds']:.0f} s"
                )
    return [row for cell in cells if (row := rows.done(cell.key)) is not None]


def _judged(row: Row, rows: Rows) -> Row:
    """With the band of the A/A row of the same set and load, and the verdict it allows."""
    key = {name: value for name, value in row["key"].items() if name != "fixed"} | {"policy": "plain"}
    plain = row if row["policy"] == "plain" else rows.done(key)
    band = band_of(plain or {})
    return {**row, "band": band, "verdict": "A/A" if row["policy"] == "plain" else verdict(row, band)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
