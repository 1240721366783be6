"""Says at the start what a run will do, and after the first updates roughly how long it will take.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.banner.Banner
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from adaflash.bench.pace import Pace
from adaflash.bench.table import WIDTH


class Banner(Callback):
    """Target, drafter, policy, rollouts, loss, data and steps in a few lines."""

    def __init__(self) -> None:
        self._pace, self._told = Pace(), False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what will happen; rank 0 alone has a screen."""
        if not trainer.is_global_zero:
            return
        table = Table(title="adaflash fit", title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, value in lines(trainer, pl_module):
            table.add_row(f"[bold]{name}[/bold]", value)
        console = Console()
        if not console.is_terminal:  # a file has no edge to wrap at
            console.width = max(console.width, WIDTH)
        console.print(table)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Time it."""
        self._pace.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once a rollout and updates have been seen: tell how long the others will take."""
        if self._told:
            return
        self._pace.end("rollout" in outputs)
        updates = trainer.max_steps - trainer.global_step
        left = self._pace.left(updates * trainer.accumulate_grad_batches, batch.visit, batch.visits)
        if left and trainer.is_global_zero:
            print(f"\n{updates} updates to go: about {duration(left)} and the validations", flush=True)
        self._told = left is not None


def duration(seconds: float) -> str:
    """In the unit that fits."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def lines(trainer: Trainer, module: Any) -> list[tuple[str, str]]:
    """Name and text of every line of the banner."""
    target, drafter = module.target, module.drafter
    frozen = sum(p.numel() for p in target.model.parameters())
    losses = " + ".join(f"{term.weight:g} {term.name}" for term in module.losses)
    anchors = f"{module.num_anchors} blocks a trajectory, {module.anchor_mix:.0%} of them where the drafter started one"
    kind = str(target.dtype).removeprefix("torch.")  # `auto` is another on another machine
    return [
        ("target", f"{module.target_name}: {frozen / 1e6:.0f} M x {kind}, {target.num_layers} layers, frozen"),
        (
            "drafter",
            f"{_trained(drafter)}, {len(drafter.layers)} layers, blocks of {drafter.block_size}, reads layers "
            f"{list(drafter.context_layers)}, mask token {drafter.mask_id} ({drafter.mask_source})",
        ),
        ("policy", f"{module.length.describe()}: {_trained(module.length)}"),
        ("rollouts", module.rollout.describe()),
        ("loss", f"{losses}; {anchors}"),
        *_data(getattr(trainer, "datamodule", None)),
        ("steps", _steps(trainer)),
        ("runs on", f"{trainer.world_size} x {module.device.type}, {trainer.precision}"),
        ("run folder", str(trainer.default_root_dir)),
    ]


def _trained(module: Any) -> str:
    """Size of what learns."""
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return f"{count / 1e6:.2f} M parameters" if count else "learns nothing"


def _data(data: Any) -> list[tuple[str, str]]:
    """Sources by role with their rows and domains, and how they are rolled out."""
    if data is None or not hasattr(data, "pools"):
        return []
    found = []
    for role, pools in data.pools.items():
        sources = [pool.source for pool in pools]
        if sources:
            domains = ", ".join(sorted({name for source in sources for name in source.domains}))
            found.append((role, f"{sum(map(len, sources))} rows of {len(sources)} sources: {domains}"))
    size, reuse, batch = data.rollout_size, data.reuse, data.batch_size
    return [*found, ("data", f"{size} prompts a rollout, used {reuse} times in batches of {batch}")]


def _steps(trainer: Trainer) -> str:
    """What is to come."""
    done = f" (from {trainer.global_step} on)" if trainer.global_step else ""
    return f"{trainer.max_steps} updates{done}, validation every {trainer.val_check_interval} batches"
