"""TensorBoard in order: what the event file holds after a fit, read back as TensorBoard reads it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_module import FakeData, FakeModule, quiet_trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from adaflash.bench.heat_map import heat_map, rates
from adaflash.bench.history import Entry
from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.board import Board, settings
from adaflash.callbacks.validate_first import ValidateFirst
from adaflash.decoding.tally import Tally

CONFIG = """
target: smollm2
seed_everything: 42
trainer: {max_steps: 9, precision: 32-true, strategy: auto, callbacks: [{class_path: x.Y}]}
data: {batch_size: 4, train: [{class_path: adaflash.S}], template_kwargs: {}}
model:
  clip: 1.0
  drafter: {class_path: adaflash.drafters.dflash.DFlash, init_args: {num_layers: 2, context_layers: [0, 2], init: null}}
  losses:
    - {class_path: adaflash.losses.ReverseKL, init_args: {name: rkl, weight: 0.2}}
    - {class_path: mine.Hinge, init_args: {margin: 1}}
"""
CHOSEN = {
    "target": "smollm2", "seed_everything": 42, "trainer.max_steps": 9, "trainer.precision": "32-true",
    "trainer.strategy": "auto", "data.batch_size": 4, "model.clip": 1.0, "model.drafter": "DFlash",
    "model.drafter.num_layers": 2, "model.drafter.context_layers": "[0, 2]", "model.losses": "rkl + mine.Hinge",
    "model.losses.rkl": "ReverseKL", "model.losses.rkl.name": "rkl", "model.losses.rkl.weight": 0.2,
    "model.losses.mine.Hinge": "Hinge", "model.losses.mine.Hinge.margin": 1,
}  # fmt: skip


def test_settings_are_the_choices_of_a_run() -> None:
    assert settings(CONFIG) == CHOSEN
    assert settings("") == {}


def test_rates_and_picture() -> None:
    early = Entry(1, 0, "val", {"all": Tally(at_risk=(4, 1, 0), survived=(1, 0, 0))})
    twice = {"math": Tally(at_risk=(2, 2, 2), survived=(2, 2, 1)), "all": Tally(at_risk=(4, 2, 2), survived=(2, 2, 1))}
    late = Entry(1, 9, "val", twice)
    assert rates([early, late], "all") == [[0.25, 0.0, None], [0.5, 1.0, 0.5]]
    assert rates([early, late], "math") == [[None] * 3, [1.0, 1.0, 0.5]]
    pytest.importorskip("matplotlib")
    figure: Any = heat_map([early, late])
    math, everything, _bar = figure.axes
    assert (math.get_title(), everything.get_title()) == ("math", "all")
    assert everything.images[0].get_array().filled(-1).tolist() == [[0.25, 0.0, -1], [0.5, 1.0, 0.5]]
    assert [text.get_text() for text in everything.texts] == ["0.25", "0.00", "0.50", "1.00", "0.50"]
    assert [label.get_text() for label in math.get_yticklabels()] == ["0", "9"]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("run")
    loggers = [
        TensorBoardLogger(folder, name="", version="", default_hp_metric=False),
        CSVLogger(folder, name="", version=""),
    ]
    callbacks = [Board(), AcceptanceMonitor(), ValidateFirst()]
    trainer = quiet_trainer(folder, callbacks, logger=loggers, num_sanity_val_steps=0, val_check_interval=2)
    module = FakeModule()
    module.provenance = {"config": CONFIG}  # type: ignore[assignment]
    trainer.fit(module, datamodule=FakeData())
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()


def test_runs_can_be_compared(board: EventAccumulator) -> None:
    assert [(e.step, e.value) for e in board.Scalars("final/tau")] == [(0, 1.0), (2, 3.5), (4, 3.5)]
    assert board.Scalars("final/domain_spread")[-1].value == 0.5 and board.Scalars("final/best_tau")[-1].value == 3.5
    assert "hp_metric" not in board.Tags()["scalars"]
    data = {tag: HParamsPluginData.FromString(content) for tag, content in board.PluginTagToContent("hparams").items()}
    sent = data["_hparams_/session_start_info"].session_start_info.hparams
    found = {name: value.string_value or value.number_value for name, value in sent.items()}
    assert found == {name: float(v) if isinstance(v, int | float) else v for name, v in CHOSEN.items()}
    metrics = {info.name.tag for info in data["_hparams_/experiment"].experiment.metric_infos}
    assert metrics == {"final/tau", "final/best_tau", "final/domain_spread", "final/position_spread"}


def test_pictures_and_pages(board: EventAccumulator) -> None:
    assert [event.step for event in board.Images("acceptance/over_time")] == [0, 2, 4]
    assert "custom_scalars__config__" in board.Tags()["tensors"]
    assert {"val/tau/math", "val/domain_spread", "val/acceptance/3"} <= set(board.Tags()["scalars"])
    assert "val/length" in board.Tags()["histograms"]
