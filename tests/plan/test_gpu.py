"""benchmarks/gpu.py at tiny shapes on the CPU: the whole script, its resumption, and its plan against its peak."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(gpu: ModuleType, output: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shape", "tiny", "--output", str(output), *more])
    gpu.main()
    return [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{") and line.endswith("}")]


def test_the_script_runs_and_goes_on(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.jsonl"
    rows = {row["cell"]: row for row in run(gpu, output, monkeypatch)}
    assert list(rows) == ["update", "verify-1", "verify-4", "decode-1", "decode-4"]
    update = rows["update"]
    assert 0.75 <= update["update_ratio"] <= 1.05 and 0.6 <= update["rollout_ratio"] <= 1.05, update
    assert update["candidates"] == 2 * 8 * 7
    parts = {name: value for name, value in update["seconds"].items() if name != "whole"}
    assert {"drafter", "vocabulary", "backward", "optimizer"} <= set(parts)
    assert sum(parts.values()) <= update["seconds"]["whole"]
    # sigma = 3.5 / 8 of a block of 8, times the rate 1.3: a window of round(4.55) = 5 rows
    assert rows["decode-4"]["rows_a_request"] == {"plain": 1.0, "full": 8.0, "adaptive": 5.0}
    # A second run finds everything done; one whose last line was torn does that cell again.
    capsys.readouterr()
    assert len(run(gpu, output, monkeypatch)) == 5 and "done before" in capsys.readouterr().out
    text = output.read_text().rstrip("\n")
    output.write_text(text[:-20])
    again = run(gpu, output, monkeypatch)
    assert [row["cell"] for row in again] == list(rows)
    # With no time left nothing is begun, and another tau is another measurement.
    assert len(run(gpu, output, monkeypatch, "--minutes", "0", "--tau", "2")) == 5
    assert "not begun" in capsys.readouterr().out
