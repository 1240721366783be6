"""TensorBoard in order: acceptance by position over time, pages of what belongs together, and runs that can be compared.

trainer:
  callbacks+:
    - class_path: adaflash.callbacks.board.Board
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from adaflash.bench import picture
from adaflash.bench.folder import run_folder
from adaflash.bench.heat_map import heat_map
from adaflash.bench.history import Entry, History
from adaflash.bench.log import boards
from adaflash.decoding.stats import OVERALL

# Of the whole config the choices that runs differ by; a list of components is one choice, their names.
COMPARED = ("target", "seed_everything", "model", "data", "trainer.max_steps", "trainer.precision", "trainer.strategy")
DATA = ("train", "val", "predict", "template_kwargs", "target")  # long, or no choice of training


class Board(Callback):
    """What the scalars alone do not show. Does nothing without a TensorBoard logger.

    - Images, `acceptance/over_time`: a heat map of acceptance by position and validation, per domain.
    - HParams: the run's settings with `final/tau`, `final/best_tau`, `final/domain_spread` and `final/position_spread`,
      as of the latest validation; a run that was killed has them too.
    - Custom scalars: pages for tau by domain, spreads, lengths, and where the time goes.
    """

    def __init__(self) -> None:
        self._started = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Lay out the page of custom scalars."""
        self._started = False
        domains = list(getattr(getattr(trainer, "datamodule", None), "domains", ()))
        for board in boards(trainer):
            board.add_custom_scalars(layout(domains))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The acceptance monitor has written its file by now."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or not boards(trainer):
            return
        entries = [entry for entry in History(run_folder(trainer)).read() if entry.stage == "val"]
        mine = [entry for entry in entries if entry.run == entries[-1].run]
        self._compare(trainer, pl_module, mine)
        if not mine:
            return
        try:
            figure = heat_map(mine)
        except ImportError:  # the acceptance monitor says what is missing
            return
        picture.show(figure, None, boards(trainer), "acceptance/over_time", trainer.global_step)

    def _compare(self, trainer: L.Trainer, pl_module: Any, entries: list[Entry]) -> None:
        """Settings once, the metrics they are compared by at every validation."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        totals = [entry.tallies[OVERALL] for entry in entries]
        taus = [total.committed / total.rounds for total in totals if total.rounds]
        final = {
            "final/tau": values.get("val/tau", float("nan")),
            "final/best_tau": max(taus, default=float("nan")),
            **{
                f"final/{name}": values.get(f"val/{name}", float("nan"))
                for name in ("domain_spread", "position_spread")
            },
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                if self._started:
                    logger.log_metrics(final, trainer.global_step)
                else:
                    logger.log_hyperparams(settings(pl_module.provenance.get("config", "")), final, trainer.global_step)
        self._started = True


def settings(config: str) -> dict[str, Any]:
    """Flat settings of a YAML config, as HParams takes them: what a run chose, not every default of Lightning."""
    content = yaml.safe_load(config) or {}
    chosen: dict[str, Any] = {}
    for key in COMPARED:
        value: Any = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if key == "data" and isinstance(value, Mapping):
            value = {name: each for name, each in value.items() if name not in DATA}
        chosen |= _flat(key, value)
    return chosen


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Components are named by their class, their settings by its key: `model.drafter`, `model.drafter.num_layers`."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        name = {key: value["class_path"].rpartition(".")[2]} if "class_path" in value else {}
        inner = {k: v for k, v in value.items() if k not in ("class_path", "init_args")} | dict(
            value.get("init_args") or {}
        )
        return name | {k: v for part, each in inner.items() for k, v in _flat(f"{key}.{part}", each).items()}
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        named = [(each.get("init_args") or {}).get("name") or each.get("class_path", "?") for each in value]
        return {key: " + ".join(named)} | {
            k: v for name, each in zip(named, value, strict=True) for k, v in _flat(f"{key}.{name}", each).items()
        }
    return {key: value if isinstance(value, bool | int | float | str) else str(value)}


def layout(domains: list[str]) -> dict[str, Any]:
    """Pages of custom scalars. Tags are regular expressions there, hence the anchors."""
    by_domain = ["val/tau$", *(f"val/tau/{name}$" for name in domains)]
    return {
        "acceptance": {
            "tau by domain": ["Multiline", by_domain],
            "spread between domains and between positions": [
                "Multiline",
                ["val/domain_spread$", "val/position_spread$"],
            ],
            "acceptance by position": ["Multiline", [r"val/acceptance/\d+$"]],
        },
        "length": {
            "length chosen, wasted and lost": ["Multiline", [f"val/length/{n}$" for n in ("mean", "wasted", "lost")]],
            "calibration and error": ["Multiline", ["val/length/calibration$", "val/length/error$"]],
        },
        "training": {
            "loss terms": ["Multiline", ["loss/.*"]],
            "where the time goes": ["Multiline", ["time/.*"]],
            "tokens and updates a second": ["Multiline", ["throughput/.*"]],
        },
    }
