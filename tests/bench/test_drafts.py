"""Samples of drafted rounds: fates, texts, exact escapes, and a file that survives a kill."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fitting
import pytest
import torch
from rich.console import Console

from adaflash.bench import drafts
from adaflash.bench.drafts import DraftedRound, Sample, sample_of
from adaflash.types import BlockLog, Trajectory

ROUND = DraftedRound(" the", [" cat", "\n", "<b>", " sat"], 3, 1, 2, " dog")
SAMPLE = Sample(7, "math", "m1", "system\n\nWhat is <1>?", [ROUND])


def trajectory() -> Trajectory:
    """w10 w11 | w12 w13 w14 w15 w16: the block at 2 kept one of two verified of three, that at 4 was cut at the end."""
    log = BlockLog(
        torch.tensor([2, 4]), torch.tensor([[13, 90, 15], [15, 16, -1]]), torch.tensor([2, 2]), torch.tensor([1, 2]),
        torch.tensor([2, 2]),
    )  # fmt: skip
    return Trajectory("t", "math", torch.arange(10, 17), 2, "length", log)


def test_a_trajectory_as_text() -> None:
    sample = sample_of(trajectory(), fitting.tokenizer(), 5, rounds=6)
    assert (sample.step, sample.domain, sample.id, sample.prompt_text) == (5, "math", "t", "w10 w11")
    first, second = sample.rounds
    assert first == DraftedRound(" w12", [" w13", " w90", " w15"], 2, 1, 2, " w14")
    assert first.fates() == ["accepted", "rejected", "unverified"]
    assert second == DraftedRound(" w14", [" w15", " w16"], 2, 2, 2, "")  # nothing of the target's own was kept
    assert len(sample_of(trajectory(), fitting.tokenizer(), 5, rounds=1).rounds) == 1


def test_the_terminal_says_it_without_colour() -> None:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(drafts.terminal([SAMPLE]))
    legend, prompt, line = out.getvalue().splitlines()[:3]
    assert legend == "drafts: ✓ accepted, ✗ rejected, · unverified; → the target's own"
    assert prompt == "math system What is <1>?"
    assert line == "  ␣the │ ✓␣cat ✗⏎ ✗<b> ·␣sat → ␣dog"


def test_colours_are_blue_and_orange() -> None:
    text = drafts.terminal([SAMPLE])
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert styles["✓␣cat"] == "bold dodger_blue2" and styles["✗<b>"] == "dark_orange" and styles["·␣sat"] == "dim"


def test_tensorboard_gets_escaped_html_that_it_does_not_change() -> None:
    page = drafts.tensorboard([SAMPLE])
    assert page.endswith(
        "<h4>math</h4><p>system What is &lt;1&gt;?</p><table><tr><td><code>␣the</code></td>"
        "<td>🟦✓<code>␣cat</code> 🟧✗<code>⏎</code> 🟧✗<code>&lt;b&gt;</code> ⬜·<code>␣sat</code></td>"
        "<td><code>␣dog</code></td></tr></table>"
    )
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    shown = plugin_util.markdown_to_safe_html(page)
    assert shown.replace("<tbody>", "").replace("</tbody>", "").replace("\n", "") == page


def test_a_torn_row_is_skipped_and_closed_and_a_step_done_again_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "run" / drafts.FILE
    drafts.append(path, [SAMPLE])
    assert json.loads(path.read_text())["rounds"][0]["candidates"] == [" cat", "\n", "<b>", " sat"]
    with path.open("a") as file:
        file.write('{"step": 8, "dom')
    newer = Sample(7, "math", "m1", "again", [])
    drafts.append(path, [newer, Sample(3, "chat", "c", "early", [ROUND])])
    assert drafts.read(path) == [Sample(3, "chat", "c", "early", [ROUND]), newer]
    assert drafts.read(tmp_path / "none.jsonl") == []


def test_the_end_of_a_long_prompt_is_shown() -> None:
    assert drafts.excerpt("a b\n c") == "a b c"
    assert drafts.excerpt("x" * 50 + "y" * 99) == "…" + "y" * 99
