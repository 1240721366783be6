"""Every adaflash command in our pages names options that exist, and the counts they give are those of the code."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from adaflash.doctor.command import doctor
from adaflash.export.command import SGLANG_TARGETS, export, import_drafter
from adaflash.export.formats import FORMATS
from adaflash.targets.families import PROVEN

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted(DOCS.glob("serve-*.md")), DOCS / "bring-your-drafter.md"]
LIGHT = {"export": export, "import": import_drafter, "doctor": doctor}


def commands(text: str) -> list[list[str]]:
    """Indented lines that begin with a program's name, continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    ((?:adaflash|vllm|python) .*)$", joined, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page: Path) -> None:
    found = commands(page.read_text())
    assert found
    for words in found:
        if words[0] != "adaflash" or words[1] not in LIGHT:
            continue
        known = {f"--{name}" for name in inspect.signature(LIGHT[words[1]]).parameters}
        assert {word for word in words if word.startswith("--")} <= known, words
    for link in re.findall(r"\]\(([\w.-]+\.md)\)", page.read_text()):
        assert (page.parent / link).is_file(), link


def test_serve_commands_are_those_that_export_prints() -> None:
    pages = {page.stem: commands(page.read_text()) for page in PAGES}
    (sglang,) = [words for words in pages["serve-sglang"] if words[0] == "python"]
    printed = shlex.split(FORMATS["sglang"].serve(Path("drafters/mine"), "TARGET", 16))
    assert sglang == printed
    (vllm,) = [words for words in pages["serve-vllm"] if words[0] == "vllm"]
    printed = shlex.split(FORMATS["vllm"].serve(Path("drafters/mine-vllm"), "TARGET", 16))
    assert vllm[:-1] == printed[:-1] and json.loads(vllm[-1]) == json.loads(printed[-1])


def test_families_named() -> None:
    text = (DOCS / "serve-sglang.md").read_text()
    assert ", ".join(SGLANG_TARGETS).replace(", qwen3, ", ",\n  qwen3, ") in text
    for family in set(PROVEN) - set(SGLANG_TARGETS):
        assert family in text
