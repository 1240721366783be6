"""Ranks decode for different numbers of rounds under sharding: no hang, the same text, and collectives that are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fitting
import pytest
import rank_fits
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.gain_table import GainTable
from adaflash.callbacks.validate_first import ValidateFirst
from adaflash.decoding.engine import Engine
from adaflash.parallel.options import ParallelOptions
from adaflash.rollouts.live import LiveRollout
from adaflash.types import Request

MODES = ("gathered", "lockstep")
PROMPTS = tiny.prompts(2, longest=20)  # one a rank


class Collectives(TorchDispatchMode):
    """Counts what goes to other ranks."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


class Count(Callback):
    """Collectives of each prediction, and the target's passes."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.passes = 0

    def on_predict_start(self, trainer, pl_module) -> None:
        inner = pl_module.target.run

        def run(*args, **kwargs):
            self.passes += 1
            return inner(*args, **kwargs)

        pl_module.target.run = run

    def on_predict_batch_start(self, *args: Any) -> None:
        self.mode = Collectives().__enter__()

    def on_predict_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)


class Prompts(rank_fits.Batches):
    def predict_dataloader(self):
        return torch.utils.data.DataLoader([tuple(PROMPTS[rank_fits.rank() :: 2])], batch_size=None)


def predict(mode: str, tokens: tuple[int, int], folder: Path):
    """Responses of this rank, of a length of its own."""
    made = fitting.module(
        tiny.target(), parallel=ParallelOptions("world", mode), max_new_tokens=tokens[rank_fits.rank()], lanes=2
    )
    count = Count()
    trainer = fitting.trainer(folder, 1, [count], devices=2, strategy="fsdp2", use_distributed_sampler=False)
    (rows,) = trainer.predict(made, datamodule=Prompts([]))
    return [(row["id"], row["response_ids"].tolist()) for row in rows], count.counts[0], count.passes


def fit(mode: str, folder: Path):
    """Live rollouts of different lengths, validation at step 0 and inside, and the table at the end."""
    rollout = LiveRollout(max_new_tokens=(3, 40)[rank_fits.rank()], lanes=2, warm_updates=1)
    made = fitting.module(tiny.target(), parallel=ParallelOptions("world", mode), rollout=rollout)
    folder = folder / f"{mode}{rank_fits.rank()}"
    folder.mkdir()
    data = fitting.data(folder, tiny.prompts(9), tiny.prompts(3, seed=5), val_batch_size=1)
    monitors = [AcceptanceMonitor(), ValidateFirst(), GainTable(max_new_tokens=4, prompts_per_domain=2)]
    trainer = fitting.trainer(
        folder, 4, monitors, devices=2, strategy="fsdp2", limit_val_batches=1.0, val_check_interval=2
    )
    trainer.fit(made, datamodule=data)
    return rank_fits.full(made.state_dict()), float(trainer.callback_metrics["val/tau"]), trainer.global_step


def everything(folder: Path):
    """All cases in one process group."""
    found: dict[Any, Any] = {("fit", mode): fit(mode, folder) for mode in MODES}
    lengths = {"gathered": [(3, 200), (3, 3)], "lockstep": [(3, 200)]}
    return found | {(mode, n): predict(mode, n, folder) for mode in MODES for n in lengths[mode]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    return run_ranks(everything, tmp_path_factory.mktemp("decoding"), timeout=200)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_decode_3_and_200_tokens_end_with_the_target_s_own_text(mode: str, found) -> None:
    whole = tiny.target()
    for rank, limit in enumerate((3, 200)):
        requests = [Request(p.tokens, limit, p.id, p.domain) for p in PROMPTS[rank::2]]
        plain = [(each.id, each.response.tolist()) for each in Engine(whole).generate(requests)]
        assert found[rank][mode, (3, 200)][0] == plain


def test_gathered_decoding_has_the_same_few_collectives_however_long_it_is(found) -> None:
    counts = [found[rank]["gathered", n][1] for rank in (0, 1) for n in ((3, 3), (3, 200))]
    passes = [found[rank]["gathered", (3, 200)][2] for rank in (0, 1)]
    assert len(set(counts)) == 1 and counts[0] < 20  # a few for the parts of target and drafter and tensors of the head
    assert passes[1] > 100 > 10 > passes[0]


def test_lockstep_keeps_company_pass_by_pass(found) -> None:
    (short, short_passes), (long, long_passes) = (found[rank]["lockstep", (3, 200)][1:] for rank in (0, 1))
    assert short == long and short_passes == long_passes > 60  # the rank that is through reads dummies
    assert long >= long_passes * 5  # an agreement and four layers each


@pytest.mark.parametrize("mode", MODES)
def test_fits_with_rollouts_validation_and_table_end_with_equal_weights(mode: str, found) -> None:
    (one, tau, steps), (other, tau_there, steps_there) = (found[rank]["fit", mode] for rank in (0, 1))
    rank_fits.assert_equal(one, other, 0)
    assert tau == tau_there >= 1 and steps == steps_there == 4
