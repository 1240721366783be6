"""The data module under a real Trainer: exact resume, finite loaders, messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from adaflash.data import pool as pools
from adaflash.data.position import Position, moved
from adaflash.data.prompts import PromptDataModule
from adaflash.data.report import DataError
from adaflash.data.sources import JsonlSource
from adaflash.errors import UserError

Make = Callable[..., PromptDataModule]


class Recorder(L.LightningModule):
    """Writes down what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []
        self.validated: list[Any] = []
        self.fail_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise RuntimeError("power cut")
        self.seen.append((batch.rollout_id, batch.visit, tuple(p.id for p in batch.prompts)))
        return self.weight.sum() + len(batch.prompts)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(tuple(p.id for p in batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [p.id for p in batch]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data(write: Callable[..., str], chats: Callable[..., Any], target: str) -> Make:
    def make(**kwargs: Any) -> PromptDataModule:
        train = [
            JsonlSource(write(chats(25, "a"), "a.jsonl"), "math"),
            JsonlSource(write(chats(15, "b"), "b.jsonl"), "chat"),
        ]
        val = [
            JsonlSource(write(chats(5, "v"), "v.jsonl"), "math"),
            JsonlSource(write(chats(3, "w"), "w.jsonl"), "chat"),
        ]
        settings = {"batch_size": 2, "rollout_size": 4, "reuse": 2, "val_batch_size": 3, "target": target}
        return PromptDataModule(**(settings | {"train": train, "val": val} | kwargs))

    return make


def fit(folder: Path, data: PromptDataModule, steps: int, resume: str | None = None, **kwargs: Any) -> Recorder:
    module = kwargs.pop("module", None) or Recorder()
    callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=False)]
    settings: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    }
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, num_sanity_val_steps=0, **(settings | kwargs),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    return module


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resume_goes_on_exactly(tmp_path: Path, data: Make, workers: int, precision: str) -> None:
    """n steps + resume = straight run, in the midst of a rollout, prefetching loader and safe loading included."""
    straight = fit(tmp_path / "a", data(num_workers=workers), 9, precision=precision)
    fit(tmp_path / "b", data(num_workers=workers), 5, precision=precision)
    rest = fit(tmp_path / "b", data(num_workers=2 - workers), 9, str(tmp_path / "b/step=5.ckpt"), precision=precision)
    assert len(straight.seen) == 9
    assert rest.seen == straight.seen[5:]
    assert straight.validated[:3] == [("v0", "w0", "v1"), ("v2", "w1", "v3"), ("w2", "v4")]


def test_resume_at_the_end_of_an_epoch_and_with_accumulation(tmp_path: Path, data: Make) -> None:
    how = {
        "limit_train_batches": 4,
        "accumulate_grad_batches": 2,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
    }
    straight = fit(tmp_path / "a", data(), 6, **how)
    fit(tmp_path / "b", data(), 4, **how)  # two epochs of two steps
    rest = fit(tmp_path / "b", data(), 6, str(tmp_path / "b/step=4.ckpt"), **how)
    assert len(straight.seen) == 12
    assert rest.seen == straight.seen[8:]


def test_a_failed_step_is_done_again(tmp_path: Path, data: Make) -> None:
    straight = fit(tmp_path / "a", data(), 6)
    module = Recorder()
    module.fail_at = 4
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path / "b", data(), 6, module=module)
    assert fit(tmp_path / "b", data(), 6, str(tmp_path / "b/step=4.ckpt")).seen == straight.seen[4:]


def test_position_counts_a_batch_once_it_is_processed(data: Make) -> None:
    module = data()
    module.setup("fit")
    progress = SimpleNamespace(ready=1, processed=0)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=progress)))
    module.trainer = SimpleNamespace(fit_loop=loop, distributed_sampler_kwargs=None)  # type: ignore[assignment]
    batch = next(iter(module.train_dataloader()))
    assert module.on_after_batch_transfer(batch, 0) is batch
    assert module.state_dict()["consumed"] == 0
    progress.processed = 1
    assert module.state_dict()["consumed"] == 1


def test_changed_data_is_said(tmp_path: Path, data: Make, write: Callable[..., str], chats: Callable[..., Any]) -> None:
    before, after = data(), data(train=[JsonlSource(write(chats(30, "c"), "c.jsonl"))])
    for module in (before, after):
        module.setup("fit")
    after.load_state_dict(before.state_dict() | {"consumed": 5})
    with pytest.warns(UserWarning, match=r"data\.train .* changed since the checkpoint"):
        assert next(iter(after.train_dataloader())).cursor == 6


@pytest.mark.parametrize(("world", "rollout_size", "expected"), [(1, 4, 4), (4, 4, 1), (2, 8, 1), (1, 8, 2), (3, 4, 2)])
def test_changed_ranks_repeat_nothing(world: int, rollout_size: int, expected: int) -> None:
    """Two rollouts of 2 x 4 prompts have begun: the new stream begins at or after sample 16 and says so."""
    saved = Position(consumed=5, world=2, rollout_size=4, visits=4, seed=0, sources="x")
    now = Position(0, world, rollout_size, rollout_size // 2 * 2, 0, "x")
    with pytest.warns(UserWarning, match="No prompt is repeated"):
        consumed = moved(saved, now)
    assert consumed % now.visits == 0
    assert consumed // now.visits == expected
    assert expected * rollout_size * world >= 16


def test_same_layout_goes_on_within_a_rollout() -> None:
    saved = Position(5, 2, 4, 4, 0, "x")
    assert moved(saved, Position(0, 2, 4, 4, 0, "x")) == 5
    assert Position.read({"consumed": 5}, saved) == saved


def on_rank(module: PromptDataModule, rank: int, world: int) -> PromptDataModule:
    kwargs = {"rank": rank, "num_replicas": world}
    module.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs)  # type: ignore[assignment]
    return module


def test_validation_on_ranks_is_equally_long(data: Make) -> None:
    ranks = []
    for rank in range(3):
        module = on_rank(data(val_batch_size=1), rank, 3)
        module.setup("validate")
        ranks.append(list(module.val_dataloader()))
    assert [len(batches) for batches in ranks] == [3, 3, 3]
    assert ranks[2][-1] == ()
    ids = [p.id for batches in ranks for batch in batches for p in batch]
    assert sorted(ids) == sorted([f"v{i}" for i in range(5)] + [f"w{i}" for i in range(3)])


def test_val_prompts_is_per_domain(data: Make) -> None:
    module = data(val_prompts=2, val_batch_size=8)
    module.setup("validate")
    assert [p.id for batch in module.val_dataloader() for p in batch] == ["v0", "w0", "v1", "w1"]


def test_prediction_reads_training_data_in_order(data: Make) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    got = trainer.predict(Recorder(), data())
    assert got is not None
    assert [name for batch in got for name in batch] == [f"a{i}" for i in range(25)] + [f"b{i}" for i in range(15)]


def test_dropped_rows_are_reported_once(
    data: Make, write: Callable[..., str], chats: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    caplog.set_level("INFO", logger="lightning.pytorch")  # other test files quieten it
    path = write([*chats(20, "c"), {"prompt": "x" * 300}, {"prompt": ""}], "odd.jsonl")
    module = data(train=[JsonlSource(path)], max_prompt_tokens=100)
    module.setup("fit")
    module.setup("fit")
    assert caplog.text.count(f"{path}: 20 rows kept, 2 dropped") == 1
    assert f"{path}:21: longer than max_prompt_tokens" in caplog.text
    assert f"{path}:22: empty content" in caplog.text
    assert len(module.pools["train"][0]) == 20


def test_all_too_long_is_an_error(data: Make, write: Callable[..., str]) -> None:
    """FAULTS 9: eight prompts of 200 tokens and room for 64."""
    module = data(train=[JsonlSource(write([{"prompt": "x" * 200}] * 8, "long.jsonl"))], max_prompt_tokens=64)
    with pytest.raises(DataError, match=r"8 of 8 .*|most of .*long\.jsonl|no usable row is left"):
        module.setup("fit")


def test_large_sources_are_sampled(
    data: Make, write: Callable[..., str], chats: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "CHECKED", 10)
    monkeypatch.setattr(pools, "SAMPLED", 9)
    rows = [row if i % 3 else {"prompt": "x" * 300} for i, row in enumerate(chats(30, "c"))]
    module = data(train=[JsonlSource(write(rows, "big.jsonl"))], max_prompt_tokens=100)
    module.setup("fit")
    report = module.pools["train"][0].source.open()
    assert "sampled rows cannot be rendered" in str(report)
    batches = iter(module.train_dataloader())
    seen = {p.id for _ in range(40) for p in next(batches).prompts}
    assert seen == {f"c{i}" for i in range(30) if i % 3}


def test_shared_prompts_are_said(data: Make, write: Callable[..., str], chats: Callable[..., Any]) -> None:
    module = data(val=[JsonlSource(write(chats(30, "a"), "again.jsonl"))])
    with pytest.warns(UserWarning, match="25 validation prompts are also in the training data"):
        module.setup("fit")


def test_misspelt_switches_are_said(data: Make) -> None:
    with pytest.warns(UserWarning, match="never mentions 'enable_thinkin'"):
        data(template_kwargs={"enable_thinkin": False}).setup("fit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_size": 4, "rollout_size": 6},
            r"data\.rollout_size = 6 must be a multiple of data\.batch_size = 4, e\.g\. 4",
        ),
        ({"batch_size": 4, "rollout_size": 2}, r"e\.g\. 4"),
        ({"reuse": 0}, r"data\.reuse must be at least 1"),
        ({"val_prompts": 0}, r"data\.val_prompts must be at least 1"),
        ({"max_dropped": 2.0}, r"data\.max_dropped"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PromptDataModule(**settings)


def test_missing_pieces_are_named(data: Make, target: str) -> None:
    with pytest.raises(DataError, match=r"data\.target is empty"):
        data(target="").setup("fit")
    for role, stage in {"train": "fit", "val": "validate", "predict": "predict"}.items():
        with pytest.raises(DataError, match=rf"data\.{role} names no source"):
            data(**{"train": [], "val": [], role: []}).setup(stage)
    assert PromptDataModule(target=target).sources["predict"] == []


@pytest.mark.parametrize(("epochs", "steps", "accumulate"), [(1, -1, 1), (2, 1000, 2), (3, 5, 1)])
def test_a_run_of_whole_epochs(
    tmp_path: Path,
    data: Make,
    write: Callable[..., str],
    chats: Callable[..., Any],
    epochs: int,
    steps: int,
    accumulate: int,
) -> None:
    """Passes over the data become updates; `max_steps` still ends it sooner."""
    module = data(train=[JsonlSource(write(chats(12, "e"), "e.jsonl"))], epochs=epochs, reuse=1)
    per_epoch = 12 // module.batch_size
    fitted = fit(tmp_path, module, steps, accumulate_grad_batches=accumulate, limit_val_batches=0)
    wanted = epochs * per_epoch // accumulate if epochs < 3 else 5
    assert fitted.trainer.global_step == wanted
    with pytest.raises(UserError, match=r"data\.epochs must be at least 0"):
        PromptDataModule("x", epochs=-1)


def test_epochs_shorter_than_a_window_are_told(tmp_path: Path, data: Make) -> None:
    """FAULTS 54: 3 batches an epoch and windows of 8: an update an epoch, of 3 batches."""
    module = data()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=4,
        max_epochs=-1, limit_train_batches=3, accumulate_grad_batches=8, limit_val_batches=0, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    recorder = Recorder()
    with pytest.warns(UserWarning, match="the last update of every epoch is one of 3 micro-batches"):
        trainer.fit(recorder, module)
    assert (trainer.global_step, len(recorder.seen)) == (4, 12)
