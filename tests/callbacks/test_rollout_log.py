"""Rollouts of training as a file: every one once, also over a kill and a resume, and readable as recorded rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import tiny
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from adaflash.callbacks.rollout_log import RolloutLog
from adaflash.data.prompts import PromptDataModule
from adaflash.data.sources import JsonlSource
from adaflash.rollouts.recorded import RecordedRollout


class Keep(Callback):
    def __init__(self) -> None:
        self.rollouts: list[tuple[int, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rollouts += [(pl_module.buffer.born, each) for each in outputs.get("rollout", ())]


def fit(folder: Path, steps: int, ckpt: Path | None = None) -> Keep:
    keep, saver = Keep(), ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)
    trainer = fitting.trainer(folder, steps, [keep, RolloutLog(), saver], enable_checkpointing=True)
    data = fitting.data(folder, tiny.prompts(12))  # 4 prompts a rollout, 4 visits
    trainer.fit(fitting.module(tiny.target()), datamodule=data, ckpt_path=ckpt)
    return keep


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rollout_once_and_as_it_was(tmp_path: Path) -> None:
    keep = fit(tmp_path, 9)
    path = tmp_path / "rollouts" / "rank-0.jsonl"
    assert [row["step"] for row in rows(path)] == [0] * 4 + [4] * 4 + [8] * 4
    for row, (born, each) in zip(rows(path), keep.rollouts, strict=True):
        assert row == {
            "id": each.id, "domain": each.domain, "prompt_ids": each.tokens[: each.prompt_length].tolist(),
            "response_ids": each.response.tolist(), "finish_reason": each.finish, "step": born,
        }  # fmt: skip


def test_a_resume_takes_out_what_it_makes_again(tmp_path: Path) -> None:
    fit(tmp_path, 9)  # last.ckpt is of update 5, in the middle of the second rollout; the third comes at 8
    path = tmp_path / "rollouts" / "rank-0.jsonl"
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"id": "torn", "ste')
    fit(tmp_path, 9, next(tmp_path.glob("*step=5.ckpt")))
    assert path.read_text() == whole


def test_it_can_be_trained_on(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    source = JsonlSource(str(tmp_path / "rollouts" / "*.jsonl"))
    data = PromptDataModule("tiny", [source], batch_size=2, rollout_size=4, reuse=1)
    data._renderer = fitting.data(tmp_path, tiny.prompts(4))._renderer
    keep = Keep()
    trainer = fitting.trainer(tmp_path / "second", 2, [keep])
    trainer.fit(fitting.module(tiny.target(), rollout=RecordedRollout()), datamodule=data)
    recorded = {row["id"]: row["response_ids"] for row in rows(tmp_path / "rollouts" / "rank-0.jsonl")}
    assert {each.id: each.response.tolist() for _, each in keep.rollouts} == recorded
