"""The prompts that ship with the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

import pytest

from adaflash.data.report import DataError
from adaflash.data.shipped import make
from adaflash.data.sources import ShippedSource

DOMAINS = ("math", "code", "chat")


def texts(domain: str, split: str) -> list[str]:
    source = ShippedSource(domain, split)
    report = source.open()
    assert report.dropped == 0
    return [source.row(i).messages[-1]["content"] for i in range(len(source))]


@pytest.mark.parametrize("domain", DOMAINS)
def test_enough_prompts_and_no_two_alike(domain: str) -> None:
    train, held_out = texts(domain, "train"), texts(domain, "eval")
    assert len(train) >= 100
    assert len(held_out) >= 24
    assert len(set(train + held_out)) == len(train) + len(held_out)


@pytest.mark.parametrize("domain", DOMAINS)
def test_evaluation_is_not_a_variant_of_training(domain: str) -> None:
    """No held-out prompt is nearly a training prompt: numbers aside, the math templates are different ones."""

    def bare(text: str) -> str:
        return "".join(letter for letter in text if not letter.isdigit()).replace(make.ENDING, "")

    for one in map(bare, texts(domain, "eval")):
        for other in map(bare, texts(domain, "train")):
            matcher = SequenceMatcher(None, one, other, autojunk=False)
            assert matcher.real_quick_ratio() < 0.8 or matcher.quick_ratio() < 0.8 or matcher.ratio() < 0.8, (
                one,
                other,
            )


def test_math_is_made_by_its_script() -> None:
    for split in ("train", "eval"):
        assert (make.HERE / split / "math.jsonl").read_text(encoding="utf-8") == make.text_of(split)


def test_ids_are_unique_and_rows_complete() -> None:
    files = chain(*((make.HERE / split).glob("*.jsonl") for split in ("train", "eval")))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row.keys() == {"id", "domain", "messages"} for row in rows)


def test_unknown_set_is_named() -> None:
    with pytest.raises(DataError, match="no train/poems"):
        ShippedSource("poems")


def test_they_render(tokenizer: Callable[..., Any]) -> None:
    from adaflash.data.chat import ChatRenderer

    source = ShippedSource("code", "eval")
    source.open()
    assert ChatRenderer(tokenizer()).prompt(source.row(0)).tokens
