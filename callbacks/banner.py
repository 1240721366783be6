"""Says at the start what a run will do, and after the first rollout roughly how long it will take.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.banner.Banner
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from adaflash.bench.table import WIDTH


class Banner(Callback):
    """Target, drafter, policy, rollouts, loss, data and steps in a few lines."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None  # clock and batches done when training began
        self._told = False

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
        """Start the clock with the first rollout."""
        if self._began is None:
            self._began = (time.monotonic(), trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once a rollout has been used up, its cost is known: tell how long the others will take."""
        if self._told or batch.visit + 1 < batch.visits or self._began is None:
            return
        self._told = True
        clock, first = self._began
        done, left = trainer.global_step - first, trainer.max_steps - trainer.global_step
        if done > 0 and left > 0 and trainer.is_global_zero:
            minutes = (time.monotonic() - clock) / done * left / 60
            print(f"\n{left} updates to go: about {minutes:.0f} min and the validations", flush=True)


def lines(trainer: Trainer, module: Any) -> list[tuple[str, str]]:
    """Name and text of every line of the banner."""
    target, drafter = module.target, module.drafter
    frozen = sum(p.numel() for p in target.model.parameters())
    losses = " + ".join(f"{term.weight:g} {term.name}" for term in module.losses)
    anchors = f"{module.num_anchors} blocks a trajectory, {module.anchor_mix:.0%} of them where the drafter started one"
    return [
        ("target", f"{module.target_name}: {frozen / 1e6:.0f} M parameters, {target.num_layers} layers, frozen"),
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
