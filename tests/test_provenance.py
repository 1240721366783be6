"""Where a checkpoint comes from: commits and changes of a real repository, files by hash, and no git at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from adaflash.callbacks.provenance_file import ProvenanceFile
from adaflash.provenance import code_state, provenance


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True).stdout


def test_commit_and_changes_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    tracked, loose = tmp_path / "one.py", tmp_path / "loose.py"
    tracked.write_text("a = 1\n")
    git(tmp_path, "add", "one.py")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    clean = {"commit": commit, "clean": True, "diff": "", "changed": [], "untracked": []}
    assert code_state(tracked) == code_state(tmp_path) == clean
    tracked.write_text("a = 2\n")
    loose.write_text("")
    state = code_state(tracked)
    diff = hashlib.sha256(git(tmp_path, "diff", "HEAD", "--binary").encode()).hexdigest()
    assert state == {**clean, "clean": False, "diff": diff, "changed": ["one.py"], "untracked": ["loose.py"]}
    assert code_state(loose) == {}  # a package somebody installed inside a checkout
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))  # and a machine without git
    assert code_state(tracked) == {} and provenance("model: {}", 7)["code"]["adaflash"] == {}


def test_a_fit_and_its_resume(tmp_path: Path) -> None:
    fitting.data(tmp_path, tiny.prompts(4), tiny.prompts(2))
    content = (tmp_path / "train.jsonl").read_bytes()
    target = tiny.target()

    def fit(steps: int, ckpt: str | None = None) -> None:
        saver = ModelCheckpoint(tmp_path / "ckpt", save_last=True, every_n_train_steps=2)
        trainer = fitting.trainer(tmp_path, steps, [ProvenanceFile(), saver], enable_checkpointing=True)
        module = fitting.module(target)
        module.provenance = provenance(f"steps: {steps}", 7)
        trainer.fit(module, datamodule=fitting.data(tmp_path, tiny.prompts(4), tiny.prompts(2)), ckpt_path=ckpt)

    fit(2)
    first = json.loads((tmp_path / "ckpt" / "provenance.json").read_text())
    [train] = first["data"]["train"]
    assert train["rows"] == 4 and train["domains"] == ["a", "b", "c"] and train["kind"] == "JsonlSource"
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    assert train["files"] == [{"path": str(tmp_path / "train.jsonl"), "bytes": len(content), "blake2b_8": digest}]
    assert first["seed"] == 7 and first["config"] == "steps: 2" and "earlier" not in first
    assert {"torch", "lightning", "adaflash", "python"} <= set(first["versions"])
    fit(4, str(tmp_path / "ckpt" / "last.ckpt"))
    checkpoint = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=True)
    again = json.loads((tmp_path / "ckpt" / "provenance.json").read_text())
    assert checkpoint["adaflash"]["provenance"] == again
    assert again["config"] == "steps: 4" and again["earlier"] == [{**first, "left_at": 2}]
    assert not list((tmp_path / "ckpt").glob(".*"))
