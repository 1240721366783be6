"""Every overlay in configs/data builds a data module, and wrong ones say what is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from adaflash.data.prompts import PromptDataModule
from adaflash.data.sources import HubSource, JsonlSource, ShippedSource

FOLDER = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(PromptDataModule, "data")
    return parser


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_overlays_build(parser: ArgumentParser, path: Path) -> None:
    module = parser.instantiate(parser.parse_args([f"--config={path}"])).data
    assert module.sources["train"]
    assert module.sources["val"]


def test_shipped_overlay_reads_three_domains(parser: ArgumentParser, target: str) -> None:
    args = [f"--config={FOLDER / 'shipped.yaml'}", f"--data.target={target}", "--data.val_prompts=2"]
    module = parser.instantiate(parser.parse_args(args)).data
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    assert {p.domain for p in batch.prompts} == {"math", "code", "chat"}
    assert len({p.id for b in module.val_dataloader() for p in b}) == 6


def test_recorded_overlay_reads_what_predict_writes(
    parser: ArgumentParser, target: str, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"id": "a", "domain": "math", "prompt_ids": [1, 2], "response_ids": [3, 4], "finish_reason": "stop"}
    (tmp_path / "runs/predict").mkdir(parents=True)
    write([row] * 4, "runs/predict/responses.jsonl")
    monkeypatch.chdir(tmp_path)
    args = [f"--config={FOLDER / 'recorded.yaml'}", f"--data.target={target}"]
    module = parser.instantiate(parser.parse_args(args)).data
    module.setup("fit")
    prompt = next(iter(module.train_dataloader())).prompts[0]
    assert (prompt.tokens, prompt.response, prompt.finish, prompt.domain) == ((1, 2), (3, 4), "stop", "math")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.batch_size=two"], "batch_size"),
        (["--data.train=[{class_path: adaflash.data.sources.JsonlSource, init_args: {paht: x}}]"], "paht"),
        (["--data.train=[{class_path: adaflash.data.sources.Jsonl}]"], "Jsonl"),
    ],
)
def test_wrong_lines_are_named(parser: ArgumentParser, args: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parser.parse_args(args)


@pytest.mark.parametrize("cls", [PromptDataModule, JsonlSource, ShippedSource, HubSource])
def test_every_setting_is_typed_and_described(cls: type[Any]) -> None:
    """A parameter without a type is silently None when it is left out (LIGHTNING 2.3)."""
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.annotation is not inspect.Parameter.empty, name
        assert f"\n        {name}: " in (cls.__doc__ or ""), f"{cls.__name__}: describe {name}"
