"""`adaflash cost`: measure what rounds cost here, and what tau drafting needs to pay."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adaflash.bench.cost import measure
from adaflash.configuration import PACKAGED, read
from adaflash.drafters.base import Drafter
from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.length.cost_table import CostTable, place
from adaflash.targets.hf import HFTarget, TargetOptions

QUICK = 3


def cost(
    checkpoint: str = "",
    target: str = "",
    block_size: int = 16,
    num_layers: int = 5,
    num_context_layers: int = 5,
    dtype: str = "auto",
    mask_token: str = "",
    loads: list[int] = [1, 4, 16, 32],  # noqa: B006  (never changed; jsonargparse reads the type from it)
    contexts: list[int] = [64, 256],  # noqa: B006
    rounds: int = 7,
    quick: bool = False,
    output: str = "",
) -> None:
    """Measure the cost table of a target and a drafter on this machine, keep it, and print it.

    Args:
        checkpoint: A checkpoint of `adaflash fit`, or the folder of a run.
        target: Without a checkpoint: fetched name, folder or Hub id. Costs depend on sizes, so an untrained drafter does.
        block_size: Of that drafter.
        num_layers: Of that drafter.
        num_context_layers: Of that drafter.
        dtype: Of that target; auto as `adaflash fit` takes it.
        mask_token: Of that target, if it needs one.
        loads: Requests decoded at once.
        contexts: Tokens a request has in the cache.
        rounds: How often every point is measured.
        quick: 3 rounds.
        output: Keep the table in this file instead of the cache.
    """
    if bool(checkpoint) == bool(target):
        raise UserError("give either --checkpoint RUN, or --target NAME and the drafter's sizes")
    loads, contexts = sorted({1, *loads}), sorted(set(contexts))
    if min(loads) < 1 or min(contexts or [0]) < 1 or rounds < 1:
        raise UserError("--loads, --contexts and --rounds are positive numbers")
    if checkpoint:
        pair = _trained(checkpoint)
    else:
        pair = _untrained(target, dtype, mask_token, block_size, num_layers, num_context_layers)
    rounds = QUICK if quick else rounds
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=rounds)
        table = measure(*pair, loads, contexts, rounds, lambda done: bar.update(task, completed=done))
    path = Path(output) if output else place(table.fingerprint)
    table.save(path)
    show(table)
    print(f"kept in {path}")


def show(table: CostTable, console: Console | None = None) -> None:
    """Milliseconds by load and window, and the tau at which each fixed length breaks even with plain decoding."""
    console = console or Console()
    context = table.contexts[-1]
    made = Table(title=f"milliseconds of a pass, {context} tokens in the cache (minimum)", title_justify="left")
    even = Table(title="tau that drafting needs to break even, by candidates verified", title_justify="left")
    for grid, first, cells in ((made, "draft", table.widths), (even, "", tuple(w - 1 for w in table.widths[1:]))):
        grid.add_column("requests", justify="right")
        for name in [*([first] if first else []), *(f"{'width' if first else 'L ='} {cell}" for cell in cells)]:
            grid.add_column(name, justify="right")
    for load in table.loads:
        costs = [table.draft_seconds(load, context), *(table.seconds(load * w, load, context) for w in table.widths)]
        made.add_row(str(load), *(f"{1000 * value:.1f}" for value in costs))
        even.add_row(str(load), *(f"{table.break_even(w - 1, load, context):.2f}" for w in table.widths[1:]))
    console.print(made, even)
    console.print(
        f"machine load {table.about.get('load_average', 0):.1f}; {table.about.get('rounds')} rounds, interleaved"
    )


def _trained(checkpoint: str) -> tuple[HFTarget, Drafter, LengthPolicy | None]:
    from adaflash.run import best_device, load_run

    module = load_run(checkpoint, device=best_device())
    return module.target, module.drafter, module.length


def _untrained(
    name: str, dtype: str, mask_token: str, block_size: int, num_layers: int, num_context_layers: int
) -> tuple[HFTarget, Drafter, LengthPolicy | None]:
    from adaflash.drafters.dflash import DFlash
    from adaflash.length.survival import SurvivalLength
    from adaflash.run import best_device

    shipped = PACKAGED / "target" / f"{name}.yaml"
    options = read(shipped).get("model", {}).get("target_options", {}) if shipped.is_file() else {}
    target = HFTarget.load(name, TargetOptions(dtype=dtype)).to(best_device())  # type: ignore[arg-type]
    drafter = DFlash(num_layers, block_size, num_context_layers, init="random")
    drafter.build(target, mask_token or options.get("mask_token", ""))
    policy = SurvivalLength()
    policy.build(target.hidden_size, block_size)
    return target, drafter.to(target.device), policy.to(target.device)
