"""`adaflash bench` from the command line: a run's own prompts and files, gone on with, and the table at the end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from adaflash.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    assert main(["fit", *words, "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]) == 0
    return tmp_path / "run"


def documented(run: Path, small: list[str]) -> None:
    """Run every command of docs/report.md, and those of the README about it, on a small scale."""
    for name in ("mine", "other"):
        Path("runs").mkdir(exist_ok=True)
        Path("runs", name).symlink_to(run) if name == "mine" else shutil.copytree(run, Path("runs", name))
    Path("traffic").mkdir()
    for name in ("support", "code"):
        lines = [json.dumps({"prompt": f"{name} {i}?", "domain": name}) + "\n" for i in range(4)]
        Path("traffic", f"{name}.jsonl").write_text("".join(lines))
    texts = [(ROOT / name).read_text() for name in ("docs/report.md", "README.md")]
    commands = [re.findall(r"^    (adaflash (?:bench|report) .*)$", text, re.MULTILINE) for text in texts]
    assert len(commands[0]) == 4 and set(commands[1]) <= set(commands[0])
    for command in commands[0]:
        words = command.split()[1:]
        assert main([*words, *(small if words[0] == "bench" else [])]) == 0, command


def test_bench_goes_on_where_it_was(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "bench",
        "--checkpoint",
        str(run),
        "--loads",
        "2",
        "--num_prompts",
        "2",
        "--max_new_tokens",
        "4",
        "--quick",
    ]
    capsys.readouterr()
    assert main([*small, "--policies", "full"]) == 0
    said = capsys.readouterr()
    assert "2 cells (plain, full; 2 at once; validation), none has a row yet" in said.err
    assert "measuring one first" in said.err and "quick cost table that was not kept" in said.out
    for word in ("validation, 2 at once: full is FullBlock, ", "A/A", "committed", "6/6"):
        assert word in said.out, word
    rows = [json.loads(line) for line in (run / "bench.jsonl").read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["plain", "full"]
    assert rows[1]["band"] == rows[0]["band"] >= 0 and rows[1]["key"]["set"] == "validation"

    assert main(small) == 0
    said = capsys.readouterr()
    assert "4 cells (plain, full, fixed, paper; 2 at once; validation), 2 have rows already" in said.err
    assert "cost: not measured, the checkpoint has no survival head" in said.out
    assert len((run / "bench.jsonl").read_text().splitlines()) == 4

    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"prompt": f"{name} {i}?", "domain": "d"}) + "\n" for i in range(4)))
    words = [*small, "--policies", "plain", "--prompts", *map(str, files), "--output", str(tmp_path / "rows.jsonl")]
    assert main([*words, "--loads", "2", "9"]) == 0
    said = capsys.readouterr()
    assert "one: 9 at once needs as many prompts, it reports 3" in said.out
    assert [json.loads(line)["key"]["set"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [
        "one",
        "two",
    ]

    documented(run, [*small[3:], "--policies", "plain", "full"])
    page = Path("report.html").read_text()  # all that a real run and its benchmark leave behind
    assert page.count("<figure") == 7 and "FixedLength(" in page and "validation" in page and "support" in page

    for flags, why in (
        (["--policies", "cost"], "the checkpoint has no survival head"),
        (["--prompts", str(tmp_path / "no.jsonl")], "no.jsonl: no such file"),
        (["--output", str(tmp_path / "no" / "rows")], "cannot be written"),
        (["--quick", "--loads", "500"], "nothing to measure"),
        (["--device", "abacus"], "--device abacus: "),
    ):
        assert main(["bench", "--checkpoint", str(run), *flags]) == 2
        assert why in capsys.readouterr().err
