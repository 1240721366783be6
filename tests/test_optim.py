"""Groups, rates and schedule of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adaflash.errors import UserError
from adaflash.optim import AdamWConfig


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
        self.head, self.bias = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.ones(1))


def build(config: AdamWConfig, steps: int = 10) -> tuple[Parts, dict[str, Any]]:
    parts = Parts()
    return parts, config.build([parts.matrix, parts.norm], [parts.head, parts.bias], steps)


def test_groups_have_names_rates_and_decay_of_their_own() -> None:
    parts, made = build(AdamWConfig(lr=3e-4, head_lr=2e-4, weight_decay=0.1, betas=(0.8, 0.9)))
    groups = {group["name"]: group for group in made["optimizer"].param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "drafter": 3e-4,
        "drafter-norms": 3e-4,
        "length": 2e-4,
    }
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "drafter": 0.1,
        "drafter-norms": 0.0,
        "length": 0.0,
    }
    assert [id(p) for p in groups["drafter"]["params"]] == [id(parts.matrix)]
    assert [id(p) for p in groups["drafter-norms"]["params"]] == [id(parts.norm)]
    assert [id(p) for p in groups["length"]["params"]] == [id(parts.head), id(parts.bias)]
    assert all(group["betas"] == (0.8, 0.9) for group in groups.values())


def test_a_policy_without_weights_has_no_group() -> None:
    made = AdamWConfig().build([nn.Parameter(torch.ones(2, 2))], [], 10)
    assert [group["name"] for group in made["optimizer"].param_groups] == ["drafter"]


def rates(config: AdamWConfig, steps: int) -> list[float]:
    """Learning rate of every optimizer step."""
    _, made = build(config, steps)
    seen = []
    for _ in range(steps):
        seen.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert made["lr_scheduler"]["interval"] == "step"
    return seen


def test_constant() -> None:
    assert rates(AdamWConfig(lr=0.5), 4) == [0.5] * 4


def test_warm_up_is_linear_and_begins_above_zero() -> None:
    assert rates(AdamWConfig(lr=0.8, warmup=4), 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_cosine_falls_to_a_tenth() -> None:
    seen = rates(AdamWConfig(lr=1.0, warmup=2, schedule="cosine"), 12)
    assert seen[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert seen[7] == pytest.approx(0.55)  # half way between 1 and 0.1
    assert seen == sorted(seen[:2]) + sorted(seen[2:], reverse=True)
    longer = rates(AdamWConfig(lr=1.0, schedule="cosine"), 1001)
    assert longer[-1] == pytest.approx(0.1, abs=1e-3)


def test_cosine_without_a_number_of_steps_is_constant() -> None:
    _, made = build(AdamWConfig(lr=1.0, schedule="cosine"), steps=-1)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    assert made["optimizer"].param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"head_lr": -1.0}, {"weight_decay": -0.1}, {"warmup": -1}])
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"model\.optimizer"):
        AdamWConfig(**wrong)  # type: ignore[arg-type]
