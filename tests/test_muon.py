"""Muon and AdamW as one optimizer: each weight moves as under the optimizer that is its own."""

from __future__ import annotations

import copy
from pathlib import Path

import fitting
import pytest
import rank_fits
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Muon

from adaflash.errors import UserError
from adaflash.muon import MuonConfig
from adaflash.parallel.options import ParallelOptions


def parts() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """A drafter's matrix and norm, and a head."""
    generator = torch.Generator().manual_seed(0)
    matrix, norm, head = (nn.Parameter(torch.randn(*s, generator=generator)) for s in ((6, 4), (4,), (1, 4)))
    return [matrix, norm], [head]


def push(weights: list[nn.Parameter], step: int) -> None:
    """The same gradients for weights of the same shapes."""
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_each_weight_moves_as_under_its_own_optimizer_also_after_a_state_was_loaded() -> None:
    config = MuonConfig(muon_lr=0.02, momentum=0.9, lr=0.01, head_lr=0.005, weight_decay=0.1, betas=(0.8, 0.9))
    drafter, head = parts()
    made = config.build(drafter, head, 10)["optimizer"]
    oracle, own_head = parts()
    muon = Muon([oracle[0]], lr=0.02, momentum=0.9, weight_decay=0.1)
    adamw = AdamW(
        [{"params": [oracle[1]], "lr": 0.01}, {"params": own_head, "lr": 0.005}], betas=(0.8, 0.9), weight_decay=0.0
    )
    for step in range(6):
        push([*drafter, *head], step)
        push([*oracle, *own_head], step)
        made.step()
        muon.step()
        adamw.step()
        for mine, theirs in zip([*drafter, *head], [*oracle, *own_head], strict=True):
            assert torch.equal(mine, theirs), step
        if step == 2:  # go on with an optimizer that never stepped
            state = copy.deepcopy(made.state_dict())
            made = config.build(drafter, head, 10)["optimizer"]
            made.load_state_dict(state)


def test_one_moment_for_matrices_two_for_the_rest() -> None:
    drafter, head = parts()
    made = MuonConfig().build(drafter, head, 10)["optimizer"]
    push([*drafter, *head], 0)
    made.step()
    assert [sorted(made.state[p]) for p in (*drafter, *head)] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]


def test_the_schedule_scales_both_rates() -> None:
    drafter, head = parts()
    made = MuonConfig(muon_lr=0.02, lr=0.01, head_lr=0.005, warmup=4).build(drafter, head, 10)
    assert {g["name"]: g["lr"] for g in made["optimizer"].param_groups} == pytest.approx(
        {"drafter": 0.005, "drafter-norms": 0.0025, "length": 0.00125}
    )


def test_mistakes_are_told_before_the_first_step() -> None:
    with pytest.raises(UserError, match=r"model\.optimizer: allowed are muon_lr > 0"):
        MuonConfig(muon_lr=0.0)
    with pytest.raises(UserError, match=r"shapes \[\(2, 2, 2\)\].*AdamWConfig"):
        MuonConfig().build([nn.Parameter(torch.ones(2, 2, 2))], [], 1)


def train(strategy: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after three updates."""
    made = rank_fits.module(
        parallel=ParallelOptions(target="replicate"), losses=fitting.losses(), optimizer=MuonConfig(muon_lr=0.01)
    )
    before = rank_fits.full(made.state_dict())
    rank_fits.fit(made, Path(folder), rank_fits.share(rank_fits.recorded(12), 3), 3, strategy=strategy)
    return before, rank_fits.full(made.state_dict())


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    before, single = train("auto", str(tmp_path / "one"))
    assert max(float((single[name] - before[name]).abs().max()) for name in before) > 0.01
    for _, weights in run_ranks(train, "ddp", str(tmp_path / "two")):
        rank_fits.assert_equal(single, weights)


def move(sharded: bool) -> torch.Tensor:
    """What three steps change in a matrix of 24 x 16, in units of the learning rate."""
    drafter, head = [nn.Parameter(torch.zeros(24, 16))], [nn.Parameter(torch.zeros(1, 4))]
    if sharded:
        mesh = init_device_mesh("cpu", (rank_fits.world(),))
        drafter = [nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)])) for weight in drafter]
    made = MuonConfig(muon_lr=1.0).build(drafter, head, 3)["optimizer"]
    for step in range(3):
        gradient = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        drafter[0].grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient
        made.step()
    return rank_fits.full({"matrix": drafter[0]})["matrix"]


def test_a_sharded_matrix_is_orthogonalized_as_a_whole() -> None:
    """Newton and Schulz iterate in bfloat16: a shard's order of summing shows in the third digit, half a matrix would
    show in the first."""
    whole = move(False)
    assert float(whole.abs().mean()) > 0.3
    for sharded in run_ranks(move, True):
        torch.testing.assert_close(sharded, whole, rtol=0, atol=0.05)


def test_fsdp2_trains(tmp_path: Path) -> None:
    """Gradients of a small batch have few directions, and rounding in the others is made as long as those: no weight is
    compared here, only that ranks agree and every matrix moved."""
    (before, one), (_, two) = run_ranks(train, "fsdp2", str(tmp_path))
    rank_fits.assert_equal(one, two, 0.0)
    assert all(not torch.equal(one[name], before[name]) for name in before)
