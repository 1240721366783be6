"""The helper that all tests of several ranks stand on: it tells who failed, and never waits for ever."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes, run_ranks


def job(case: str) -> float:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    print(f"rank {rank} is here")
    if case == "raise" and rank == 1:
        raise ValueError("no luck")
    if case == "hang" and rank == 1:
        time.sleep(60)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    return float(total)


def test_values_come_back_by_rank() -> None:
    assert run_ranks(job, "fine") == [3.0, 3.0]


def test_a_rank_that_raises_is_named_and_ends_the_others() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)rank 0 \(exit 1.*rank 1 \(exit 1.*rank 1 is here.*ValueError: no luck"
    ):
        run_ranks(job, "raise")


def test_a_hang_is_killed_and_its_stacks_are_shown() -> None:
    start = time.monotonic()
    ended = outcomes(job, "hang", timeout=4)
    assert [each.hung for each in ended] == [True, True] and time.monotonic() - start < 15
    assert "all_reduce" in ended[0].output and "in job" in ended[1].output
