"""The table of `fit` and `validate`: tau before and after, tokens per second with and without the drafter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from adaflash.bench.folder import run_folder
from adaflash.bench.gain import measure_gain
from adaflash.bench.history import History
from adaflash.bench.table import WIDTH, Gain, render
from adaflash.types import Prompt


class GainTable(Callback):
    """Measures once training or validation is over, prints the table and writes `gain.json` into the run folder.

    Both engines come from `pl_module.engine(drafter=...)`; prompts are the first of each domain of
    `trainer.datamodule.val_dataloader()`. Tau before and now are the first and the latest validation in the
    `acceptance.csv` of the run folder (see `AcceptanceMonitor`). Where the ratio is below 1 the table says `no gain`, and
    the tau at which drafting would break even at the same cost of a round.

    Every run has it, under a key of its own:

        gain: {max_new_tokens: 64, prompts_per_domain: 2, rounds: 1, requests_at_once: 1, after: both}

    Every prompt is decoded 2 * rounds times with each engine. With several ranks all of them measure, each with its own
    prompts, and rank 0 reports. A failure is raised only after the last checkpoint has been written.

    Args:
        max_new_tokens: Longest response.
        prompts_per_domain: How many prompts of each domain.
        rounds: Repeats of plain, drafted, drafted, plain per group.
        requests_at_once: The load: prompts of one group, decoded together.
        after: The commands that end with the table.
        folder: Where `acceptance.csv` is and `gain.json` goes. Default: the run's root folder.
    """

    def __init__(
        self,
        max_new_tokens: int = 64,
        prompts_per_domain: int = 4,
        rounds: int = 1,
        requests_at_once: int = 1,
        after: Literal["fit", "validate", "both"] = "both",
        folder: str | None = None,
    ) -> None:
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("prompts_per_domain", prompts_per_domain),
            ("rounds", rounds),
            ("requests_at_once", requests_at_once),
        ):
            if value < 1:
                raise ValueError(f"GainTable: {name} is {value}; allowed are 1 and more")
        self.max_new_tokens, self.prompts_per_domain = max_new_tokens, prompts_per_domain
        self.rounds, self.requests_at_once, self.folder = rounds, requests_at_once, folder
        self.after = after
        self._path: Path | None = None
        self._gain: Gain | None = None
        self._failure: Exception | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the run folder, on every rank."""
        folder = Path(self.folder) if self.folder else run_folder(trainer)
        self._path, self._gain, self._failure = folder / "gain.json", None, None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure while the drafter is still on its device; the last checkpoint is written after this hook."""
        if self.after == "validate":
            return
        try:
            self._measure(trainer, pl_module)
        except Exception as failure:  # raised in on_fit_end
            self._failure = failure

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise what went wrong, now that nothing can be lost by it."""
        if self._failure is not None:
            raise self._failure

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure at the end of `adaflash validate`; not at the validations inside `fit`."""
        if trainer.state.fn == "validate" and self.after != "fit":
            self._measure(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print last, below the progress bars and Lightning's own table."""
        if self._gain is not None and trainer.is_global_zero:
            console = Console()
            if not console.is_terminal:  # a file has no edge to wrap at
                console.width = max(console.width, WIDTH)
            console.print(render(self._gain))
        self._gain = None

    @torch.no_grad()
    def _measure(self, trainer: L.Trainer, pl_module: Any) -> None:
        if getattr(trainer, "fast_dev_run", False) or trainer.received_sigterm:
            return
        with pl_module.decoding():  # ranks without prompts take part: weights may be sharded
            if prompts := self._prompts(trainer):
                self._decode(trainer, pl_module, prompts)

    def _decode(self, trainer: L.Trainer, pl_module: Any, prompts: dict[str, list[Prompt]]) -> None:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        modes = [(module, module.training) for module in pl_module.modules()]
        pl_module.eval()
        try:
            plain, drafted = pl_module.engine(drafter=False), pl_module.engine(drafter=True)
            with _together(pl_module):
                rows = measure_gain(plain, drafted, prompts, self.max_new_tokens, self.rounds, self.requests_at_once)
        finally:
            for module, training in modes:
                module.training = training
        assert self._path is not None
        before, now = History(self._path.parent).first_and_latest() or (None, None)
        self._gain = Gain(rows, _policy(drafted), self.requests_at_once, self.max_new_tokens, before, now, load, cores)
        if trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._gain.as_json(), indent=2) + "\n")

    def _prompts(self, trainer: L.Trainer) -> dict[str, list[Prompt]]:
        """The first prompts of each domain; reading stops once every domain that is known has enough."""
        data = getattr(trainer, "datamodule", None)
        chosen: dict[str, list[Prompt]] = {name: [] for name in getattr(data, "domains", ())}
        known = bool(chosen)
        batches: Iterable[Any] = data.val_dataloader() if data is not None else ()
        for batch in batches:
            for prompt in batch:
                mine = chosen.setdefault(prompt.domain, [])
                if len(mine) < self.prompts_per_domain:
                    mine.append(prompt)
            if known and all(len(mine) == self.prompts_per_domain for mine in chosen.values()):
                break
        return {name: mine for name, mine in chosen.items() if mine}


def _together(module: Any) -> AbstractContextManager[None]:
    """Ranks have different numbers of prompts; where weights are sharded they must stay together until the last is done."""
    ranks = getattr(getattr(module, "target", None), "ranks", None)
    return ranks.decoding() if ranks is not None else nullcontext()


def _policy(engine: Any) -> str:
    """What chose the lengths, in its own words."""
    policy: Any = getattr(engine, "policy", None)
    return str(policy.describe()) if hasattr(policy, "describe") else type(policy).__name__
