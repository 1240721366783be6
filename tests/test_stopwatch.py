"""Wall time by part, on a clock that is set by hand."""

from __future__ import annotations

import pytest

from adaflash import stopwatch
from adaflash.stopwatch import Stopwatch, timed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Worker:
    def __init__(self, clock: Clock) -> None:
        self.watch, self.clock = Stopwatch(), clock

    @timed("work")
    def work(self, seconds: float) -> float:
        self.clock.now += seconds
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch, "time", made)
    return made


def test_parts_add_up_apart(clock: Clock) -> None:
    worker = Worker(clock)
    assert worker.work(2.0) == 2.0
    with worker.watch("rollout"):
        clock.now += 5
    worker.work(1.0)
    worker.watch.start("optimizer")
    clock.now += 0.5
    worker.watch.stop("optimizer")
    worker.watch.stop("never begun")
    assert worker.watch.seconds == {"work": 3.0, "rollout": 5.0, "optimizer": 0.5, "never begun": 0.0}


def test_time_counts_up_to_an_error_and_the_wait_belongs_to_the_part(clock: Clock) -> None:
    watch = Stopwatch()

    def wait() -> None:
        clock.now += 1

    watch.wait = wait
    with pytest.raises(ZeroDivisionError), watch("drafter"):
        clock.now += 2
        1 / 0  # noqa: B018
    assert watch.seconds["drafter"] == 3  # what ran, and the wait for it at the end
