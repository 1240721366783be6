"""Configs by name, includes, and the nearest valid word."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.configuration import expand, find, nearest, shipped, with_includes
from adaflash.errors import UserError


def test_a_name_is_looked_for_here_and_then_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("length/full").parts[-2:] == ("length", "full.yaml") and not find("length/full").is_relative_to(
        tmp_path
    )
    (tmp_path / "length").mkdir()
    (tmp_path / "length" / "full.yaml").write_text("model: {}\n")
    assert find("length/full") == tmp_path / "length" / "full.yaml"


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean experiment/adaflash"):
        find("experiment/adaflsh")


def test_includes_are_laid_under_the_file_each_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: [b, c]\n")
    (tmp_path / "b.yaml").write_text("include: [c]\n")
    (tmp_path / "c.yaml").write_text("run: x\n")
    assert [path.stem for path in with_includes(tmp_path / "a.yaml")] == ["c", "b", "a"]


def test_a_circle_of_includes_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: [b]\n")
    (tmp_path / "b.yaml").write_text("include: [a]\n")
    with pytest.raises(UserError, match=r"a\.yaml: includes itself by way of .*b\.yaml"):
        with_includes(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1\nb: 2\n", r"bad\.yaml:2: not valid YAML"),
        ("- 1\n", "a config is a mapping"),
        ("include: x\n", "`include` is a list"),
        ("model: [1]\n", "`model` is a mapping of its settings, not a list"),
        ("model: {a: 1}\ndata: {}\nmodel: {b: 2}\n", r"bad\.yaml:3: .*'model' stands here for the second time"),
        ("model:\n  a: 1\n  a: 2\n", r"bad\.yaml:3: .*'a' stands here for the second time"),
    ],
)
def test_a_broken_config_names_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        with_includes(tmp_path / "bad.yaml")


def test_a_config_with_everything_commented_out_lays_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# model: {}\n")
    (tmp_path / "b.yaml").write_text("include: [a]\n")
    assert with_includes(tmp_path / "a.yaml") == []
    assert [path.stem for path in with_includes(tmp_path / "b.yaml")] == ["b"]


def test_expand_keeps_the_order_and_the_other_words(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: [b]\n")
    (tmp_path / "b.yaml").write_text("run: x\n")
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    assert expand(["--x", "1", "-c", a, "--y=2"]) == ["--x", "1", "--config", b, "--config", a, "--y=2"]
    assert expand([f"--config={a}"]) == [f"--config={b}", f"--config={a}"]


def test_every_shipped_config_is_found() -> None:
    names = list(shipped())
    assert "experiment/adaflash" in names and "base" in names
    assert all(find(name).is_file() for name in names)


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("trainer.max_stepz", ["trainer.max_steps", "trainer.max_epochs"], "trainer.max_steps"),
        ("num_layer", ["num_layers", "lr"], "num_layers"),
        ("zzz", ["num_layers"], ""),
    ],
)
def test_nearest(word: str, known: list[str], found: str) -> None:
    assert nearest(word, known) == found
