"""Sums of an optimizer window: added, closed once, divided exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaflash.window import Window, divide_gradients, mean_gradients


def test_sums_add_up_in_fp64_and_the_next_window_is_empty() -> None:
    window = Window()
    loss = torch.tensor(2.0, requires_grad=True)
    window.add({"weight": torch.tensor(1e8), "loss": loss * 3, "share": torch.tensor([1.0, 2.0])})
    window.add({"weight": torch.tensor(1.0), "loss": loss, "late": torch.tensor(7)})
    sums = window.close()
    assert {name: value.tolist() for name, value in sums.items()} == {
        "weight": 100000001.0, "loss": 8.0, "share": [1.0, 2.0], "late": 7.0,
    }  # fmt: skip
    assert not any(value.requires_grad for value in sums.values())  # no graph is kept alive
    assert window.close() == {}


def test_ranks_are_summed_by_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names travel in sorted order, whatever order they were added in."""
    calls: list[list[float]] = []

    def all_reduce(flat: torch.Tensor) -> None:
        calls.append(flat.tolist())
        flat += torch.tensor([10.0, 20.0, 30.0, 40.0])

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    window = Window()
    window.add({"weight": torch.tensor(4.0), "blocks": torch.tensor(1), "share": torch.tensor([2.0, 3.0])})
    sums = window.close()
    assert calls == [[1.0, 2.0, 3.0, 4.0]]  # blocks, share, weight
    assert {name: value.tolist() for name, value in sums.items()} == {
        "blocks": 11.0, "share": [22.0, 33.0], "weight": 44.0,
    }  # fmt: skip


def test_gradients_are_divided_in_place() -> None:
    one, none, two = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([6.0, 9.0]), torch.tensor([3.0, 0.0])
    divide_gradients([one, none, two], 3.0)
    assert one.grad.tolist() == [2.0, 3.0]
    assert two.grad.tolist() == [1.0, 0.0]
    assert none.grad is None


def test_a_denominator_of_zero_leaves_zeros_and_never_gives_nan() -> None:
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.zeros(2)
    divide_gradients([one], 0.0)
    divide_gradients([], 3.0)
    assert one.grad.tolist() == [0.0, 0.0]


def test_a_mean_gradient_is_clipped_and_one_that_is_not_finite_stops_before_a_weight_is_touched() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([6.0, 8.0, 0.0])
    assert float(mean_gradients([weight], 2.0, 1.0, 7, "drafter")) == 5.0
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8, 0.0], rel=1e-5)
    weight.grad = torch.tensor([1.0, float("inf"), 0.0])
    with pytest.raises(FloatingPointError, match="update 7: the gradient of the drafter is not finite"):
        mean_gradients([weight], 2.0, 1.0, 7, "drafter")
    assert weight.tolist() == [1.0, 1.0, 1.0]
