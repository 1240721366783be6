"""Whatever the strategy, two ranks are one process with the doubled batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fitting
import pytest
import rank_fits
import tiny
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import run_ranks
from torch import nn

from adaflash.errors import UserError
from adaflash.losses import LossTerm
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.strategy import check_sharded, check_strategy
from adaflash.rollouts.recorded import RecordedRollout

PROMPTS = rank_fits.recorded(12)


PLACES = {
    "ddp": ("ddp", ParallelOptions()),
    "fsdp2": ("fsdp2", ParallelOptions(target="replicate")),
    "fsdp2, sharded target": ("fsdp2", ParallelOptions(target="world", recompute=True)),
    "hybrid": ("ddp", ParallelOptions(target="world")),
    "lockstep": ("fsdp2", ParallelOptions(target="world", rollouts="lockstep")),
}


class Bent(LossTerm):
    """A term that learns a matrix and a number."""

    def __init__(self) -> None:
        super().__init__(0.1, "bent")
        generator = torch.Generator().manual_seed(5)
        self.bend = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, student, teacher, token):
        return (student[:, :5].tanh() @ self.bend).pow(2).sum(-1) * self.scale


def train(strategy: str, options: ParallelOptions, folder: Path, **settings):
    """Three updates of two micro-batches each, the first and the last clipped: weights, and what was logged."""
    made, log = rank_fits.module(clip=10.05, parallel=options, losses=[*fitting.losses(), Bent()]), rank_fits.Log()
    before = rank_fits.full(made.state_dict())
    settings = {"accumulate_grad_batches": 2, "strategy": strategy, **settings}
    rank_fits.fit(made, folder, rank_fits.share(PROMPTS, 3) * 2, 3, log, **settings)
    after = rank_fits.full(made.state_dict())
    assert [name for name in before if torch.equal(after[name], before[name])] == []
    assert all(p.grad is None for p in made.target.model.parameters())
    return after, log.updates


def uneven():
    """Batches in the first of which rank 1 of two has no block."""
    made = enumerate(rank_fits.recorded(8, seed=4))
    prompts = [dataclasses.replace(p, response=p.response[:1]) if i in (1, 3) else p for i, p in made]
    return rank_fits.share(prompts, 2)


def nothing_to_learn(strategy: str, options: ParallelOptions, folder: Path):
    """Two updates, in the first of which rank 1 has no block."""
    made, log = rank_fits.module(parallel=options), rank_fits.Log()
    rank_fits.fit(made, folder, uneven(), 2, log, strategy=strategy)
    return rank_fits.full(made.state_dict()), log.updates


def frozen(strategy: str, options: ParallelOptions, folder: Path):
    """Two updates of the length policy alone; the drafter has no gradient memory and no moments."""
    made, log = rank_fits.module(parallel=options, freeze_drafter=True), rank_fits.Log()
    trainer = rank_fits.fit(made, folder, rank_fits.share(PROMPTS, 3), 2, log, strategy=strategy)
    assert all(p.grad is None for p in made.drafter.parameters())
    assert len(trainer.optimizers[0].state) == len(list(made.length.parameters()))
    return rank_fits.full(made.state_dict()), log.updates


def half(folder: Path):
    """Number formats of masters, moments and what a layer computes with, under bf16-mixed."""
    made = fitting.module(tiny.target(), rollout=RecordedRollout(), parallel=ParallelOptions("world", recompute=True))
    seen: set[torch.dtype] = set()
    made.drafter.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, _: seen.add(m.weight.dtype))
    trainer = rank_fits.fit(made, folder, rank_fits.share(PROMPTS, 3), 2, strategy="fsdp2", precision="bf16-mixed")
    moments = {v.dtype for state in trainer.optimizers[0].state.values() for k, v in state.items() if k != "step"}
    return {p.dtype for p in made.parameters()}, moments, seen, rank_fits.full(made.state_dict())


def train_all(folder: Path):
    """Every strategy in one process group."""
    found = {name: train(*place, folder) for name, place in PLACES.items()}
    empty = {("nothing", name): nothing_to_learn(*place, folder) for name, place in PLACES.items()}
    still = {("frozen", name): frozen(*PLACES[name], folder) for name in ("hybrid", "lockstep")}
    return {**found, **empty, **still, "half": half(folder)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return train("auto", ParallelOptions(), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory):
    return run_ranks(train_all, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("place", PLACES)
def test_two_ranks_are_one_process_with_the_doubled_batch(place: str, alone, together) -> None:
    weights, log = alone
    for found in together:
        rank_fits.assert_equal(weights, found[place][0])
        rank_fits.assert_same_log(log, found[place][1])
    assert log[0]["grad_norm/drafter"] > 10.05 > log[1]["grad_norm/drafter"]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_with_nothing_to_learn_changes_nothing_for_the_others(place: str, together, tmp_path: Path) -> None:
    weights, log = nothing_to_learn("auto", ParallelOptions(), tmp_path)
    for found in together:
        rank_fits.assert_equal(weights, found["nothing", place][0])
        rank_fits.assert_same_log(log, found["nothing", place][1])


@pytest.mark.parametrize("place", ["hybrid", "lockstep"])
def test_a_frozen_drafter_needs_no_gradients(place: str, together, tmp_path: Path) -> None:
    weights, log = frozen("auto", ParallelOptions(), tmp_path)
    for found in together:
        rank_fits.assert_equal(weights, found["frozen", place][0])
        rank_fits.assert_same_log(log, found["frozen", place][1])


def test_half_precision_computes_in_bf16_and_keeps_fp32(together) -> None:
    (masters, moments, seen, weights), (*_, others) = (found["half"] for found in together)
    assert masters == moments == {torch.float32} and seen == {torch.bfloat16}
    rank_fits.assert_equal(weights, others, 0)


def train_on_nodes(folder: Path):
    """Two nodes of two devices: the target is sharded within each, the drafter averaged or sharded over all."""
    options = ParallelOptions("node", "lockstep")
    return {name: train(name, options, folder, num_nodes=2) for name in ("ddp", "fsdp2")}


def test_two_nodes_of_two_devices_are_one_process_too(alone, tmp_path: Path) -> None:
    weights, log = alone
    for found in run_ranks(train_on_nodes, tmp_path, world=4, nodes=2, timeout=90):
        for weights_there, log_there in found.values():
            rank_fits.assert_equal(weights, weights_there)
            rank_fits.assert_same_log(log, log_there)


# ---- what is refused ----


def test_a_weight_that_would_train_apart_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"2 trainable parameters are not sharded \(first: weight\)"):
        check_sharded(nn.Linear(2, 2))
    check_sharded(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("strategy", "says"), [("fsdp", "fsdp2"), (ModelParallelStrategy(), "fsdp2"), ("deepspeed_stage_2", "fsdp2 or ddp")]
)
def test_strategies_that_would_not_train_right_are_refused(strategy, says: str) -> None:
    with pytest.raises(UserError, match=f"trainer.strategy: .*{says}"):
        check_strategy(strategy)
    check_strategy("fsdp2")
    check_strategy("ddp")
    check_strategy("auto")
