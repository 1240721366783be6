"""K9: 5 steps + resume + 5 steps equals 10 steps bit for bit; checkpoints are small, safe to load, and checked."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import fitting
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.length.fixed import FullBlock
from adaflash.module import AdaFlashModule
from adaflash.optim import AdamWConfig
from adaflash.rollouts.base import RolloutFailed
from adaflash.rollouts.live import LiveRollout
from adaflash.saving import LastCheckpoint

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


class Diary(Callback):
    """What every micro-batch trained on, and what every rollout was."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, ...]] = []
        self.blocks: list[list[int]] = []
        self.losses: list[float] = []
        self.rollouts: list[tuple[int, list[Tensor]]] = []

    def setup(self, trainer, pl_module: AdaFlashModule, stage: str) -> None:
        made = pl_module._lesson

        def listen(*args):
            lesson = made(*args)
            self.blocks.append([*lesson.blocks.rows.tolist(), *lesson.blocks.anchors.tolist()])
            return lesson

        pl_module._lesson = listen  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches.append((batch.rollout_id, batch.visit, [p.id for p in batch.prompts]))
        self.losses.append(float(outputs["loss"]))
        if outputs.get("rollout"):
            self.rollouts.append((len(self.batches), [each.tokens for each in outputs["rollout"]]))


def make(target, **settings: Any) -> AdaFlashModule:
    sampled = LiveRollout(max_new_tokens=12, lanes=4, warm_updates=3, temperature=0.8)
    optimizer = AdamWConfig(1e-2, 1e-2, weight_decay=0.01, warmup=6, schedule="cosine")
    return fitting.module(target, **{"rollout": sampled, "optimizer": optimizer, **settings})


def run(target, folder: Path, steps: int, ckpt: str | None = None, every: int = 1000, **settings: Any):
    """Fit up to `steps`; returns module, diary and trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    diary, module = Diary(), make(target)
    data = fitting.data(folder, tiny.prompts(11), tiny.prompts(3, seed=9), seed=4)  # visits: 4 a rollout
    saver = ModelCheckpoint(
        folder, filename="s{step}", every_n_train_steps=every, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = fitting.trainer(folder, 10, [diary, saver], enable_checkpointing=True, **settings)
    trainer.fit_loop.epoch_loop.max_steps = steps  # the schedule still ends at 10
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return module, diary, trainer


def same(one: Any, other: Any, where: str = "") -> None:
    """Bitwise equality of nested states."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


SETTINGS = {
    "mid-rollout": (5, {}),  # visit 0 of rollout 1 is done, three are left
    "rollout's end": (4, {}),
    "accumulate": (5, {"accumulate_grad_batches": 2}),
    "epoch's end": (5, {"limit_train_batches": 5}),
    "validation": (5, {"limit_val_batches": 1.0, "val_check_interval": 5}),
}


@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_resuming_equals_never_stopping(target, tmp_path: Path, case: str) -> None:
    stop, settings = SETTINGS[case]
    whole, story, straight = run(target, tmp_path / "whole", 10, **settings)
    first, begun, _ = run(target, tmp_path / "half", stop, every=stop, **settings)
    torch.manual_seed(12345)  # nothing may depend on the global generator
    rest, ended, resumed = run(target, tmp_path / "half", 10, str(tmp_path / "half" / f"s{stop}.ckpt"), **settings)
    assert resumed.global_step == straight.global_step == 10
    for field in ("batches", "blocks", "losses"):
        assert getattr(begun, field) + getattr(ended, field) == getattr(story, field), field
    done = len(begun.batches)
    rollouts = begun.rollouts + [(done + at, tokens) for at, tokens in ended.rollouts]
    same(rollouts, story.rollouts)  # made at the same steps: the unfinished one was not made again
    same(dict(rest.state_dict()), dict(whole.state_dict()))
    same(resumed.optimizers[0].state_dict(), straight.optimizers[0].state_dict())
    same(
        resumed.lr_scheduler_configs[0].scheduler.state_dict()["_last_lr"],
        straight.lr_scheduler_configs[0].scheduler.state_dict()["_last_lr"],
    )
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), rest.parameters(), strict=True))


class Failing(LiveRollout):
    """Its third rollout cannot be made."""

    made = 0

    def collect(self, prompts, players):
        self.made += 1
        if self.made == 3:
            raise RolloutFailed("the server is gone")
        return super().collect(prompts, players)


def test_a_rollout_that_fails_loses_nothing(target, tmp_path: Path) -> None:
    whole, story, straight = run(target, tmp_path / "whole", 10)
    half = tmp_path / "half"
    half.mkdir()
    diary, last = Diary(), LastCheckpoint(dirpath=half, save_last=True, every_n_train_steps=1000)
    trainer = fitting.trainer(half, 10, [last.signals, diary, last], enable_checkpointing=True)
    module = make(target, rollout=Failing(max_new_tokens=12, lanes=4, warm_updates=3, temperature=0.8))
    with pytest.raises(RolloutFailed):
        trainer.fit(module, datamodule=fitting.data(half, tiny.prompts(11), tiny.prompts(3, seed=9), seed=4))
    assert len(diary.losses) == torch.load(half / "last.ckpt", weights_only=True)["global_step"] == 8
    rest, ended, resumed = run(target, half, 10, str(half / "last.ckpt"))
    assert diary.batches + ended.batches == story.batches
    assert diary.losses + ended.losses == story.losses
    same(dict(rest.state_dict()), dict(whole.state_dict()))
    same(resumed.fit_loop.epoch_loop.state_dict(), straight.fit_loop.epoch_loop.state_dict())


def test_the_unfinished_rollout_travels_with_its_tensors(target, tmp_path: Path) -> None:
    module, _, _ = run(target, tmp_path, 5, every=5)
    saved = torch.load(tmp_path / "s5.ckpt", weights_only=True)["adaflash"]["rollout"]
    assert (saved["rollout_id"], saved["visits_left"]) == (1, 3)
    fresh = make(target)
    fresh.buffer.load_state_dict(saved)
    assert fresh.buffer.born == 4
    for loaded, kept in zip(fresh.buffer.trajectories, module.buffer.trajectories, strict=True):
        for name in ("tokens", "context", "teacher"):
            assert torch.equal(getattr(loaded, name), getattr(kept, name))
        same(vars(loaded.blocks), vars(kept.blocks))
        assert (loaded.id, loaded.domain, loaded.prompt_length, loaded.finish) == (
            kept.id,
            kept.domain,
            kept.prompt_length,
            kept.finish,
        )


def test_a_finished_rollout_is_not_kept(target, tmp_path: Path) -> None:
    run(target, tmp_path, 4, every=4)
    assert torch.load(tmp_path / "s4.ckpt", weights_only=True)["adaflash"]["rollout"]["trajectories"] == []


# ---- what a checkpoint holds ----


def tensors(of: Any) -> list[Tensor]:
    if isinstance(of, Tensor):
        return [of]
    parts = of.values() if isinstance(of, dict) else of if isinstance(of, (list, tuple)) else []
    return [tensor for part in parts for tensor in tensors(part)]


def test_a_checkpoint_holds_drafter_head_and_adam_and_loads_safely(target, tmp_path: Path) -> None:
    module, _, _ = run(target, tmp_path, 4, every=4)
    path = tmp_path / "s4.ckpt"
    saved = torch.load(path, weights_only=True)  # plain values and tensors only
    names = set(dict(module.named_parameters()))
    assert set(saved["state_dict"]) == names
    weights = sum(p.nbytes for p in module.parameters())
    assert weights * 3 <= path.stat().st_size <= weights * 3.1 + 100_000
    shapes = {tuple(t.shape) for t in tensors(saved)}
    assert (tiny.VOCAB, target.hidden_size) not in shapes  # neither embedding nor output head
    assert sum(t.nbytes for t in tensors(saved)) < weights * 3 + 10_000


def test_hyper_parameters_are_plain(target, tmp_path: Path) -> None:
    run(target, tmp_path, 4, every=4)
    saved = torch.load(tmp_path / "s4.ckpt", weights_only=True)
    for value in [*saved.get("hyper_parameters", {}).values(), *saved["adaflash"]["made_for"].values()]:
        assert isinstance(value, (str, int, float, bool, list, dict, type(None)))


# ---- what is refused ----


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(target, folder, 2, every=2)
    return folder / "s2.ckpt"


def resume(module: AdaFlashModule, folder: Path, ckpt: Path) -> None:
    data = fitting.data(folder, tiny.prompts(11), seed=4)
    fitting.trainer(folder, 3).fit(module, datamodule=data, ckpt_path=str(ckpt), weights_only=True)


def edited(saved: Path, folder: Path, change) -> Path:
    state = torch.load(saved, weights_only=True)
    change(state)
    torch.save(state, folder / "edited.ckpt")
    return folder / "edited.ckpt"


@pytest.mark.parametrize("key", ["drafter.fc.weight", "length.head.out.bias"])
def test_a_missing_key_is_an_error(target, tmp_path: Path, saved: Path, key: str) -> None:
    path = edited(saved, tmp_path, lambda state: state["state_dict"].pop(key))
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        resume(make(target), tmp_path, path)


def test_a_surplus_key_is_an_error(target, tmp_path: Path, saved: Path) -> None:
    path = edited(saved, tmp_path, lambda state: state["state_dict"].update(odd=torch.zeros(1)))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"odd"'):
        resume(make(target), tmp_path, path)


def test_a_foreign_checkpoint_is_refused(target, tmp_path: Path, saved: Path) -> None:
    path = edited(saved, tmp_path, lambda state: state.pop("adaflash"))
    with pytest.raises(UserError, match="not written by adaflash"):
        resume(make(target), tmp_path, path)


def drafter(**changes: Any) -> dict[str, Any]:
    settings = {"num_layers": 1, "block_size": 8, "context_layers": [0, 2], "mask_id": tiny.VOCAB - 1, "init": "random"}
    return {"drafter": DFlash(**{**settings, **changes})}


@pytest.mark.parametrize(("field", "old", "new", "change"), [
    ("block_size", "8", "4", lambda: drafter(block_size=4)),
    ("context_layers", r"\[0, 2\]", r"\[0, 1\]", lambda: drafter(context_layers=[0, 1])),
    ("mask_id", "96", "95", lambda: drafter(mask_id=95)),
    ("length", "AdaptiveLength", "FullBlock", lambda: {"length": FullBlock()}),
])  # fmt: skip
def test_another_architecture_is_refused_by_field(target, tmp_path: Path, saved: Path, field, old, new, change) -> None:
    with pytest.raises(UserError, match=f"checkpoint's {field} is .*{old}.*this run's is .*{new}"):
        resume(make(target, **change()), tmp_path, saved)


def test_another_target_is_refused_by_field(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(UserError, match="checkpoint's target_layers is 4, this run's is 5"):
        resume(make(tiny.target(num_hidden_layers=5)), tmp_path, saved)
