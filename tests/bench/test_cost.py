"""Measuring the cost table, on a tiny target: the grid is whole, rising, kept and found; the command prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from adaflash.bench import cost_command
from adaflash.bench.cost import measure, widths_of
from adaflash.cli import main
from adaflash.errors import UserError
from adaflash.length.cost_table import find, place


def test_widths() -> None:
    assert widths_of(4) == (1, 2, 3, 4)
    assert widths_of(16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert widths_of(2) == (1, 2) and widths_of(15)[-1] == 15


def test_measured_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path))
    target = tiny.target()
    drafter = tiny.drafter(target, 4)
    told: list[int] = []
    monkeypatch.setattr(cost_command, "_trained", lambda checkpoint: (target, drafter, None))
    cost_command.cost(checkpoint="run", loads=[2], contexts=[8, 20], quick=True)
    shown = capsys.readouterr().out
    assert "break" in shown and str(tmp_path) in shown
    table, stale = find(target, drafter)
    assert not stale
    assert table.loads == (1, 2) and table.contexts == (8, 20) and table.about["rounds"] == 3
    for at in table.verify:
        for row in at:
            assert row[0] > 0 and row == sorted(row)
    assert table.draft[0] <= table.draft[1] and all(d > 0 for row in table.draft for d in row)
    again = measure(target, drafter, None, (1, 2), (8,), 1, told.append)
    assert told == [1] and place(again.fingerprint) == place(table.fingerprint)


def test_wrong_words_are_named() -> None:
    with pytest.raises(UserError, match="--checkpoint"):
        cost_command.cost()
    with pytest.raises(UserError, match="positive"):
        cost_command.cost(checkpoint="run", rounds=0)


def test_the_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost"]) == 2 and "--target" in capsys.readouterr().err
