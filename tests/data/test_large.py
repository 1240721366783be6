"""FAULTS 79: 200,000 lines begin in seconds, with memory that does not follow the text."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest

from adaflash.data.chat import ChatRenderer
from adaflash.data.pool import PromptPool
from adaflash.data.sources import JsonlSource
from adaflash.data.stream import PromptStream

LINES = 200_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MB; every thousandth line is broken."""
    text = "x" * 200
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    with path.open("w") as file:
        for i in range(LINES):
            row = {"id": i, "messages": [{"role": "user", "content": f"Question {i}? {text}"}]}
            file.write("{broken\n" if i % 1000 == 999 else json.dumps(row) + "\n")
    return path


def test_many_lines_begin_soon_and_stay_small(path: Path, tokenizer) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    pool = PromptPool(JsonlSource(str(path)), ChatRenderer(tokenizer()), 0, seed=0)
    report = pool.check(0.1)
    first = PromptStream([pool], rollout_size=8, visits=1, seed=0).batch(0)
    seconds = time.process_time() - began  # of this process: other work on the machine does not count
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert (report.kept, report.reasons) == (LINES - 200, {"broken JSON": 200})
    assert len(first.prompts) == 8
    assert seconds < 15, seconds  # 3.5 s beside other work on two cores
    assert grown < 30, grown  # MB; the file has 60
