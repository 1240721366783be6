"""benchmarks/study.py: its rows, its split and its sums, and one row from nothing to its JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from adaflash.data.chat import ChatRenderer
from adaflash.data.sources import ShippedSource
from adaflash.data.tokenizer import load_renderer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "study.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(study: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", *words])
    study.main()


def test_rows_have_names_of_their_own_and_the_headline_is_complete(study: ModuleType) -> None:
    rows = study.rows(100)
    assert len({row.name for row in rows}) == len(rows)
    headline = {(row.experiment, row.temperature, row.seed) for row in rows if "-s" in row.name and "-t" in row.name}
    assert {(m, t, s) for m in ("dflash", "osd", "adaflash") for t in (0.0, 0.7) for s in (0, 1, 2)} <= headline


def test_the_base_and_what_goes_on_from_it_share_no_prompt(study: ModuleType) -> None:
    lines = [json.dumps({"domain": domain, "n": n}) for n in range(20) for domain in ("math", "code", "new")]
    parts = study.split(lines)
    assert sorted(parts["base"] + parts["continue"]) == sorted(lines)
    counts = {d: sum(json.loads(line)["domain"] == d for line in parts["base"]) for d in ("math", "code", "new")}
    assert counts == {"math": 15, "code": 6, "new": 10}  # 0.75, 0.3 and, where nothing is said, 0.5


def test_claims_compare_seed_by_seed(study: ModuleType, tmp_path: Path) -> None:
    taus = {"dflash-t0-s0": (1.0, 2.0), "dflash-t0-s1": (2.0, 2.0), "osd-t0-s0": (1.5, 3.0), "osd-t0-s1": (2.0, 3.0)}
    for name, (math, code) in taus.items():
        found = {"tau": {"all": 9.0, "math": math, "code": code}, "spread": {"domain_spread": 0.5}}
        found["verified_per_committed"] = 2.0
        row = {"row": name, "results": {"full": found}, "settings": {"trainer": {"max_steps": 7}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    # means over domains: 1.5 and 2.0 against 2.25 and 2.5
    assert study.claims(tmp_path) == ["- osd against dflash at t0: +37.5% (by seed +50.0%, +25.0%)"]
    assert "| osd-t0-s0 | 9.000 | 1.500 | 3.000 |  | 0.500 |  | 2.000 | 7 |" in study.table(tmp_path)


def test_words_that_mean_nothing_are_refused(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in [
        (["dflsh-*"], "no row is called dflsh-*"),
        ([], "--data: the folder with prompts/eval and rollouts is needed"),
        (["--data", str(tmp_path)], "no .jsonl of responses"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            call(study, monkeypatch, *words, "--runs", str(tmp_path / "runs"))
        assert message in f"{stopped.value} {capsys.readouterr().err}"


def lay_out(folder: Path, renderer: ChatRenderer) -> None:
    """Prompts of the shipped files; the responses are made up, since only their form matters here."""
    (folder / "prompts" / "eval").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    rows = []
    for domain in ("math", "code", "chat"):
        source = ShippedSource(domain=domain, split="eval", limit=1)
        source.open()
        messages = [{"role": "user", "content": f"Tell me about {domain}."}]
        held_out = {"id": f"{domain}-0", "domain": domain, "messages": messages}
        (folder / "prompts" / "eval" / f"{domain}.jsonl").write_text(json.dumps(held_out) + "\n")
        prompt = renderer.prompt(source.row(0))
        row = {"domain": domain, "prompt_ids": list(prompt.tokens), "finish_reason": "length"}
        rows += [
            row | {"id": f"{domain}-{n}", "response_ids": [(7 * n + k) % 90 + 9 for k in range(24)]} for n in range(16)
        ]
    (folder / "rollouts" / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_from_nothing_to_its_json_and_then_not_again(
    study: ModuleType,
    make_target: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "target").mkdir()
    target = str(make_target(tmp_path / "target", "llama", num_hidden_layers=12))
    lay_out(tmp_path / "data", load_renderer(target))
    words = [
        "--target",
        target,
        "--data",
        str(tmp_path / "data"),
        "--runs",
        str(tmp_path / "runs"),
        "--output",
        str(tmp_path / "rows"),
    ]
    words += ["--base_updates", "2", "--updates", "2", "--prompts", "1", "--tokens", "6", "adaflash-t0-s0"]
    call(study, monkeypatch, *words)
    path = tmp_path / "rows" / "adaflash-t0-s0.json"
    row = json.loads(path.read_text())
    assert set(row["results"]) == {"full", "survival", "paper"} and row["requests"] == 3
    assert row["base"] == study.fingerprint(tmp_path / "runs" / "base" / "model.safetensors")
    assert str(tmp_path) not in path.read_text()  # nothing of this machine
    assert 1 <= row["results"]["full"]["tau"]["all"] <= 8
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    call(study, monkeypatch, *words)
    assert "measured already" in capsys.readouterr().out and path.stat().st_mtime_ns == before
