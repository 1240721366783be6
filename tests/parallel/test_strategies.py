"""Whatever the strategy, two ranks are one process with the doubled batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_fits
from ranks import run_ranks

PROMPTS = rank_fits.recorded(12)


def train(strategy: str, folder: Path):
    """Three updates of two micro-batches each, the first and the last clipped: weights, and what was logged."""
    made, log = rank_fits.module(clip=10.05), rank_fits.Log()
    before = rank_fits.full(made.state_dict())
    rank_fits.fit(made, folder, rank_fits.share(PROMPTS, 3) * 2, 3, log, accumulate_grad_batches=2, strategy=strategy)
    after = rank_fits.full(made.state_dict())
    assert all((after[name] != before[name]).any() for name in before)
    return after, log.updates


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return train("auto", tmp_path_factory.mktemp("alone"))


def test_two_ranks_of_ddp_are_one_process_with_the_doubled_batch(alone, tmp_path: Path) -> None:
    weights, log = alone
    for weights_there, log_there in run_ranks(train, "ddp", tmp_path):
        rank_fits.assert_equal(weights, weights_there)
        rank_fits.assert_same_log(log, log_there)
