"""Commands decode where the machine is fastest: everything of a run lies on one device, whichever it is."""

from __future__ import annotations

import exporting
import pytest
import torch

from adaflash import run
from adaflash.bench.cost_command import _trained, _untrained
from adaflash.generate import _engines
from adaflash.run import best_device, load_run

ELSEWHERE = torch.device("meta")  # a second device that every machine has; nothing can be computed there


def devices(*owners: torch.nn.Module) -> set[str]:
    return {tensor.device.type for owner in owners for tensor in (*owner.parameters(), *owner.buffers())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("run")
    target = exporting.save_target(folder / "target")
    exporting.save_run(folder, target)
    return str(folder / "last.ckpt"), target


def test_a_run_lies_on_the_device_that_is_asked_for(saved: tuple[str, str]) -> None:
    for where in (None, ELSEWHERE):
        module = load_run(saved[0], device=where)
        assert devices(module.drafter, module.length, module.target.model) == {where.type if where else "cpu"}


def test_commands_ask_for_the_best_one(saved: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "best_device", lambda: ELSEWHERE)
    checkpoint, target = saved
    engine, rival, _ = _engines(checkpoint, "", 2, -1, False)
    assert devices(engine.target.model, engine.drafter, engine.policy, rival.target.model) == {"meta"}  # type: ignore[union-attr, arg-type]
    assert devices(_engines("", target, 2, -1, False)[0].target.model) == {"meta"}
    for pair in (_trained(checkpoint), _untrained(target, "float32", "w96", 4, 2, 1)):
        assert devices(pair[0].model, pair[1], pair[2]) == {"meta"}  # type: ignore[arg-type]


def test_the_best_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert best_device().type == name
