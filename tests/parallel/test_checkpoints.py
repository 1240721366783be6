"""The checkpoint of every strategy loads in every other, on any number of ranks; resuming is exact; export reads shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fitting
import lightning as L
import pytest
import rank_fits
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from ranks import run_ranks

from adaflash.checkpoint import WholeCheckpoints, whole_checkpoints
from adaflash.length.survival import SurvivalLength
from adaflash.parallel.checkpoints import is_sharded, read_sharded
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.strategy import FSDP2Strategy
from adaflash.rollouts.live import LiveRollout

PROMPTS = rank_fits.recorded(12)
SAVED = ("ddp", "fsdp2", "shards", "hybrid")  # by two ranks; "single" by one process


def strategy(name: str) -> Any:
    return {"shards": FSDP2Strategy(save_distributed_checkpoint=True), "hybrid": "ddp", "single": "auto"}.get(
        name, name
    )


def options(name: str) -> ParallelOptions:
    return ParallelOptions("world" if name in ("hybrid", "shards") else "replicate")


def run(name: str, folder: Path, steps: int, ckpt: Path | None = None) -> tuple[L.Trainer, Any]:
    """Fit up to `steps` on the same six batches of two prompts a rank, in float64."""
    made = rank_fits.module(parallel=options(name))
    trainer = fitting.trainer(
        folder, 6, devices=rank_fits.world(), strategy=strategy(name), use_distributed_sampler=False,
        plugins=[WholeCheckpoints()],
    )  # fmt: skip
    trainer.fit_loop.epoch_loop.max_steps = steps
    batches = rank_fits.share(PROMPTS, 6)
    data = rank_fits.Batches(batches[3:] + batches[:3] if ckpt else batches)  # this loader begins at its first
    trainer.fit(made, datamodule=data, ckpt_path=str(ckpt) if ckpt else None, weights_only=True)
    return trainer, made


def save(name: str, folder: Path) -> Path:
    """Three updates, and a checkpoint."""
    trainer, _ = run(name, folder, 3)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return folder / f"{name}.ckpt"


def finish(name: str, folder: Path, ckpt: Path):
    """From there to six updates."""
    trainer, made = run(name, folder, 6, ckpt)
    assert trainer.global_step == 6
    return rank_fits.full(made.state_dict())


def save_all(folder: Path):
    return [save(name, folder) for name in SAVED]


def finish_all(folder: Path):
    """Every checkpoint under every strategy."""
    files = [*SAVED, "single"]
    return {(a, b): finish(b, folder, folder / f"{a}.ckpt") for a in files for b in ("ddp", "fsdp2", "shards")}


def alone(folder: Path):
    return {name: finish("fsdp2", folder, folder / f"{name}.ckpt") for name in ("shards", "ddp")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the checkpoint of every strategy."""
    place = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, place)
    save("single", place)
    return place


@pytest.fixture(scope="module")
def straight(folder: Path):
    """Six updates without a stop, in one process."""
    return rank_fits.full(run("single", folder, 6)[1].state_dict())


def test_two_ranks_load_the_checkpoints_of_every_strategy(folder: Path, straight) -> None:
    for found in run_ranks(finish_all, folder, timeout=120):
        for weights in found.values():
            rank_fits.assert_equal(straight, weights)


def test_one_process_loads_the_checkpoints_of_two_ranks(folder: Path, straight) -> None:
    for name in SAVED:
        rank_fits.assert_equal(straight, finish("single", folder, folder / f"{name}.ckpt"))
    for weights in run_ranks(alone, folder, world=1)[0].values():
        rank_fits.assert_equal(straight, weights)


def test_files_are_alike_and_hold_no_target(folder: Path) -> None:
    assert is_sharded(folder / "shards.ckpt") and len(list((folder / "shards.ckpt").glob("*.distcp"))) == 2
    contents = {
        name: torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("ddp", "fsdp2", "hybrid", "single")
    }
    contents["shards"] = read_sharded(folder / "shards.ckpt")
    assert len(whole_checkpoints(folder)[0]) == 5 and whole_checkpoints(folder)[1] == []
    assert not list(folder.glob(".*"))  # nothing half-written, no second copy
    for content in contents.values():
        rank_fits.assert_equal(contents["single"]["state_dict"], content["state_dict"])
        assert {key.split(".")[0] for key in content["state_dict"]} == {"drafter", "length"}
        groups = content["optimizer_states"][0]["param_groups"]
        assert [group["name"] for group in groups] == ["drafter", "drafter-norms", "length"]


# ---- from two ranks to one and back, in the midst of a rollout ----


class Remembering(SurvivalLength):
    """Keeps books, as policies that know cost do."""

    def build(self, hidden_size: int, block_size: int) -> None:
        super().build(hidden_size, block_size)
        self.books = getattr(self, "books", torch.zeros(2, dtype=torch.float64))

    def observe(self, done) -> None:
        self.books += torch.tensor([1.0, done.committed], dtype=torch.float64)

    def get_extra_state(self):
        return self.books

    def set_extra_state(self, state) -> None:
        self.books = state.clone()


class Diary(Callback):
    """What every batch was made of."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches.append((batch.rollout_id, batch.visit, float(outputs["loss"])))


def live(folder: Path, steps: int, ckpt: str = "", save_to: str = "", name: str = "fsdp2"):
    """Live rollouts of four visits, so that three updates end within one."""
    made = fitting.module(tiny.target(), parallel=ParallelOptions("world"), length=Remembering(),
                          rollout=LiveRollout(max_new_tokens=12, lanes=4, warm_updates=2, temperature=0.7))  # fmt: skip
    place = folder / f"{rank_fits.rank()}"
    place.mkdir(exist_ok=True)
    diary = Diary()
    trainer = fitting.trainer(folder, steps, [diary], devices=rank_fits.world(), strategy=strategy(name))
    data = fitting.data(place, tiny.prompts(11))
    trainer.fit(made, datamodule=data, ckpt_path=str(folder / ckpt) if ckpt else None, weights_only=True)
    if save_to:
        trainer.save_checkpoint(folder / save_to)
    return diary.batches, rank_fits.full(made.state_dict()), made.length.books


def whole_and_halves(folder: Path):
    return live(folder, 6), live(folder, 3, save_to="three.ckpt"), live(folder, 6, "three.ckpt")


def back(folder: Path):
    return live(folder, 7, "one.ckpt")


def test_two_ranks_to_one_to_two(tmp_path: Path) -> None:
    (whole, first, rest), (whole_there, _, rest_there) = run_ranks(whole_and_halves, tmp_path, timeout=90)
    assert first[0] + rest[0] == whole[0]  # each rank has its own half of the open rollout again
    rank_fits.assert_equal(whole[1], rest[1], 0)
    assert rest[2].tolist() == whole[2].tolist()  # those of rank 0
    assert [batch[2] for batch in whole[0]] != [batch[2] for batch in whole_there[0]]
    rank_fits.assert_equal(rest[1], rest_there[1], 0)
    with pytest.warns(UserWarning, match="The checkpoint is of 2 ranks"):
        alone, *_ = live(tmp_path, 5, "three.ckpt", "one.ckpt", "auto")
    assert alone[0][:2] == (2, 0)  # two rollouts of four prompts were begun on two ranks: the third of this one
    one, other = run_ranks(back, tmp_path)
    assert one[0][0][1] == 0 and len(one[0]) == 2
    rank_fits.assert_equal(one[1], other[1], 0)
