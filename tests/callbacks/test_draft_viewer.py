"""The draft viewer in a real fit: the same prompts at every validation, in the file, TensorBoard and the terminal."""

from __future__ import annotations

from pathlib import Path

import fitting
import pytest
import tiny
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adaflash.bench import drafts
from adaflash.callbacks.draft_viewer import DraftViewer
from adaflash.callbacks.validate_first import ValidateFirst


def test_samples_of_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tiny.prompts(6)
    target = tiny.target()
    target.tokenizer = fitting.tokenizer()
    trainer = fitting.trainer(
        tmp_path, 2, [ValidateFirst(), DraftViewer(per_domain=1, rounds=2)], val_check_interval=2, limit_val_batches=1.0,
        logger=TensorBoardLogger(tmp_path, name="", version=""),
    )  # fmt: skip
    module = fitting.module(target)
    trainer.fit(module, datamodule=fitting.data(tmp_path, prompts[:4], prompts))
    rows = drafts.read(tmp_path / drafts.FILE)
    assert [(row.step, row.domain, row.id) for row in rows] == [(s, d, i) for s in (0, 2) for d, i in
                                                                 (("a", "p0"), ("b", "p1"), ("c", "p2"))]  # fmt: skip
    assert all(len(row.rounds) == 2 and len(row.rounds[0].candidates) == 7 for row in rows)  # all K were computed
    [first] = [row for row in rows if row.step == 2 and row.domain == "a"]
    again = module.engine(all_candidates=True).generate([module._request(prompts[0])])[0]
    assert first == drafts.sample_of(again, target.tokenizer, 2, 2)
    board = EventAccumulator(str(tmp_path)).Reload()
    events = board.Tensors("drafts/text_summary")
    assert [event.step for event in events] == [0, 2]
    assert events[-1].tensor_proto.string_val[0].decode() == drafts.tensorboard([r for r in rows if r.step == 2])
    shown = capsys.readouterr().out
    assert shown.count("✓ accepted") == 2 and f"{drafts.visible(first.rounds[0].anchor)} │" in shown
