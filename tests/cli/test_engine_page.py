"""docs/engine.md: its Python and its command work as shown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from adaflash.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()


def test_the_page_runs(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["fit", *words, "--run", "runs/quickstart", "--trainer.max_steps", "1"]) == 0
    capsys.readouterr()
    [shown] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(shown, "docs/engine.md", "exec"), {})
    assert re.match(r"(stop|length) tensor\(\[\s*1,\s+2,\s+3, ", capsys.readouterr().out)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    [command] = re.findall(r"`adaflash (generate [^`]*)`", PAGE)
    assert main([*shlex.split(command), "--max_new_tokens", "4"]) == 0
    assert len([json.loads(row) for row in (tmp_path / "texts.jsonl").read_text().splitlines()]) == 2
