"""The plan of the real target, beside the target as it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaflash.decoding.engine import Engine
from adaflash.plan.command import parse
from adaflash.plan.estimate import estimate
from adaflash.plan.meter import nbytes
from adaflash.targets.fetch import fetched_path
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(fetched_path("smollm2-135m") is None, reason="run: adaflash fetch smollm2-135m"),
]


def test_weights_and_pool_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--data.max_prompt_tokens 12 --model.rollout.init_args.max_new_tokens 4 --data.rollout_size 4"
    job, _, _ = parse(["-c", "experiment/quickstart", *flags.split()])
    parts = {part.name: part.phases for part in estimate(job).parts}
    dtype = str(job.dtype).removeprefix("torch.")
    target = HFTarget.load("smollm2-135m", TargetOptions(dtype=dtype))  # type: ignore[arg-type]
    assert parts["target weights"]["rollout"] == nbytes(list(target.model.parameters()))
    engine = Engine(target, lanes=4)
    # Plain decoding keeps one place for the anchor where a drafter's block takes four.
    engine.generate([Request(tuple(range(20, 32)), 4 + job.drafter.block_size - 1) for _ in range(4)])
    assert parts["target KV pool"]["rollout"] == engine.memory["target_pool"]
