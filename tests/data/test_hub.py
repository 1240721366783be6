"""HubSource against a stand-in for `datasets`: no network, and the package is an extra."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from adaflash.data.report import DataError
from adaflash.data.sources import HubSource

Fake = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Fake:
    def install(rows: list[dict[str, Any]]) -> None:
        def load_dataset(path: str, name: str | None, split: str, **more: Any) -> list[dict[str, Any]]:
            if split == "nope":
                raise ValueError("Unknown split")
            return rows

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    return install


def test_template_makes_the_turn(hub: Fake) -> None:
    hub([{"question": "1 + 1?", "answer": "2"}, {"question": " ", "answer": ""}])
    source = HubSource("openai/gsm8k", "main", "train", domain="math", template="{question}")
    assert source.open().kept == 1
    row = source.row(0)
    assert (row.id, row.domain, row.messages[0]["content"]) == ("main[train]:1", "math", "1 + 1?")
    assert "openai/gsm8k/main[train]:2: empty content" in str(source.report)


def test_columns_are_renamed(hub: Fake) -> None:
    hub([{"prompt": ["first?", "second?"], "prompt_id": 7}])
    source = HubSource("mt-bench", columns={"turns": "prompt", "id": "prompt_id"})
    source.open()
    assert (source.row(0).id, source.row(0).messages[0]["content"]) == ("7", "first?")


def test_missing_column_is_counted(hub: Fake) -> None:
    hub([{"prompt": "a"}])
    report = HubSource("x", columns={"messages": "chat"}).open()
    with pytest.raises(DataError, match=r"missing column \('chat', found prompt\)"):
        report.check(0.5)


def test_fingerprint_follows_the_data(hub: Fake) -> None:
    def fingerprint() -> str:
        source = HubSource("x")
        source.open()
        return source.fingerprint()

    hub([{"prompt": "a"}, {"prompt": "b"}])
    one = fingerprint()
    assert one == fingerprint()
    hub([{"prompt": "a"}, {"prompt": "c"}])
    assert one != fingerprint()


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package `datasets`: install adaflash\[data\]"):
        HubSource("openai/gsm8k").open()


def test_what_cannot_be_loaded_is_named(hub: Fake) -> None:
    hub([])
    with pytest.raises(DataError, match=r"cannot load x\[nope\] \(ValueError: Unknown split\)"):
        HubSource("x", split="nope").open()
