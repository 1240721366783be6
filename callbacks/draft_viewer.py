"""Shows what the drafter says and what becomes of it: samples of every validation, in the terminal and in TensorBoard.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.draft_viewer.DraftViewer
      init_args: {per_domain: 1, rounds: 6}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from adaflash.bench import drafts
from adaflash.bench.folder import run_folder
from adaflash.bench.log import boards
from adaflash.types import Trajectory


class DraftViewer(Callback):
    """Keeps the first responses of each domain of a validation and shows their first drafted rounds.

    The prompts are the same at every validation, so the samples can be compared over training. They go to the terminal,
    to TensorBoard's text page and into `drafts.jsonl` of the run folder. With several ranks rank 0 shows its own prompts.

    Args:
        per_domain: Responses shown per domain.
        rounds: Rounds shown per response.
        terminal: Print them as well.
    """

    def __init__(self, per_domain: int = 1, rounds: int = 6, terminal: bool = True) -> None:
        self.per_domain, self.rounds, self.terminal = per_domain, rounds, terminal
        self._seen: Counter[str] = Counter()
        self._kept: list[Trajectory] = []
        self._loaded_step: int | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """`validate` from a checkpoint does not restore the loops, so the step is remembered here."""
        self._loaded_step = checkpoint.get("global_step")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to collect."""
        self._seen.clear()
        self._kept = []

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the first of each domain that were served."""
        for each in outputs.get("trajectories", ()):
            if each.finish != "error" and self._seen[each.domain] < self.per_domain:
                self._seen[each.domain] += 1
                self._kept.append(each)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write and show them, on rank 0."""
        tokenizer = pl_module.target.tokenizer
        if trainer.sanity_checking or not trainer.is_global_zero or tokenizer is None or not self._kept:
            return
        fitting = trainer.state.fn == "fit"
        step = trainer.global_step if fitting or self._loaded_step is None else self._loaded_step
        samples = [drafts.sample_of(each, tokenizer, step, self.rounds) for each in self._kept]
        samples.sort(key=lambda sample: sample.domain)
        if not getattr(trainer, "fast_dev_run", False):
            drafts.append(run_folder(trainer) / drafts.FILE, samples)
        for board in boards(trainer):
            board.add_text("drafts", drafts.tensorboard(samples), step)
        if self.terminal:
            Console(highlight=False, soft_wrap=True).print(drafts.terminal(samples))
