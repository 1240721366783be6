"""Ranks stop together: an exception on one of them, and a signal to one or to all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fitting
import pytest
import rank_fits
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from ranks import outcomes, run_ranks

from adaflash.parallel.failing import FailTogether
from adaflash.parallel.options import ParallelOptions
from adaflash.saving import LastCheckpoint
from adaflash.stopping import Stopped

PLACES = {"ddp": ParallelOptions("replicate"), "fsdp2": ParallelOptions("world", "lockstep")}


class At(Callback):
    """Does something on chosen ranks before a batch."""

    def __init__(self, batch: int, ranks: tuple[int, ...], what: str) -> None:
        self.batch, self.ranks, self.what = batch, ranks, what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.batch:
            if self.what == "sleep" and trainer.global_rank not in self.ranks:
                time.sleep(60)  # in no collective: nothing but the watch can tell it
            if trainer.global_rank in self.ranks and self.what == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif trainer.global_rank in self.ranks:
                raise ValueError("no luck with this batch")


def fit(strategy: str, at: At, folder: Path, steps: int = 8, **settings):
    """Live rollouts; what the saver wrote lies in `folder`."""
    saver = LastCheckpoint(dirpath=folder, filename="s{step}", save_last=True, auto_insert_metric_name=False)
    made = fitting.module(tiny.target(), parallel=PLACES[strategy])
    place = folder / str(rank_fits.rank())
    place.mkdir(parents=True, exist_ok=True)
    data = fitting.data(place, tiny.prompts(9))
    callbacks = [saver.signals, FailTogether(), at, saver]
    trainer = fitting.trainer(
        folder, steps, callbacks, devices=2, strategy=strategy, enable_checkpointing=True, **settings
    )
    trainer.fit(made, datamodule=data)
    return trainer


def told(strategy: str, ranks: tuple[int, ...], folder: Path):
    """A run that is signalled before its third batch; the update it stopped after, and what it said."""
    start = time.monotonic()
    try:
        fit(strategy, At(2, ranks, "signal"), folder, accumulate_grad_batches=2)
    except Stopped as stopped:
        saved = torch.load(folder / "last.ckpt", weights_only=True)
        return stopped.status, str(stopped), saved["global_step"], time.monotonic() - start
    raise AssertionError("the run went on")


def signalled(folder: Path):
    """SIGTERM to either rank, and to both, one after the other in one process group."""
    return {
        (strategy, ranks): told(strategy, ranks, folder / f"{strategy}{len(ranks)}{ranks[0]}")
        for strategy, ranks in [("ddp", (1,)), ("ddp", (0, 1)), ("fsdp2", (0,)), ("fsdp2", (0, 1))]
    }


def test_a_signal_to_one_rank_or_to_all_stops_all_after_the_same_update(tmp_path: Path) -> None:
    for found in run_ranks(signalled, tmp_path):
        for case, (status, text, step, _) in found.items():
            assert (status, step) == (143, 2), case  # batch 2 opens the second window of two batches
            assert "SIGTERM after update 2" in text and "last.ckpt" in text


def failing(strategy: str, rank: int, what: str, folder: Path) -> None:
    fit(strategy, At(2, (rank,), what), folder)


@pytest.mark.parametrize(
    ("strategy", "rank", "what"), [("ddp", 1, "raise"), ("fsdp2", 0, "raise"), ("fsdp2", 1, "sleep")]
)
def test_an_exception_on_one_rank_stops_all_with_its_message(
    strategy: str, rank: int, what: str, tmp_path: Path
) -> None:
    ended = outcomes(failing, strategy, rank, what, tmp_path, timeout=50)
    assert not any(each.hung for each in ended)
    assert "ValueError: no luck with this batch" in ended[rank].error
    other = ended[1 - rank]
    assert f"rank {rank} failed: ValueError: no luck with this batch" in other.error + other.output
    assert other.exitcode == 1 and other.seconds - ended[rank].seconds < 12
