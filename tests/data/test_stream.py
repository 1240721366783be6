"""The stream: rollouts, visits, ranks, workers, bad rows."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from adaflash.data.chat import ChatRenderer
from adaflash.data.pool import PromptPool
from adaflash.data.report import DataError
from adaflash.data.sources import JsonlSource
from adaflash.data.stream import CursorLoader, PromptStream

Make = Callable[..., PromptStream]


@pytest.fixture
def stream(write: Callable[..., str], chats: Callable[..., Any], tokenizer: Callable[..., Any]) -> Make:
    def make(sizes: tuple[int, ...] = (10, 6), weights: tuple[float, ...] = (1, 1), **kwargs: Any) -> PromptStream:
        pools = []
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=False)):
            name = "abcdef"[number]
            source = JsonlSource(write(chats(size, name), f"{name}.jsonl"), domain=name, weight=weight)
            source.open()
            pools.append(PromptPool(source, ChatRenderer(tokenizer()), number, seed=0))
        return PromptStream(pools, **({"rollout_size": 4, "visits": 3, "seed": 0, "rows": 2} | kwargs))

    return make


def take(stream: PromptStream, count: int, workers: int = 0, start: int = 0) -> list[Any]:
    def begin(stream: PromptStream) -> None:
        stream.start = start

    batches = iter(CursorLoader(stream, begin, workers))
    return [next(batches) for _ in range(count)]


def test_a_rollout_is_visited_again_and_again(stream: Make) -> None:
    batches = take(stream(), 7)
    assert [(b.rollout_id, b.visit, b.visits, b.rows, b.cursor) for b in batches] == [
        (n // 3, n % 3, 3, 2, n + 1) for n in range(7)
    ]
    assert batches[0].prompts == batches[1].prompts == batches[2].prompts != batches[3].prompts
    assert len(batches[0].prompts) == 4


@pytest.mark.parametrize("start", [0, 4])
def test_order_does_not_depend_on_workers(stream: Make, start: int) -> None:
    alone = take(stream(), 9 + start)[start:]
    assert take(stream(), 9, workers=2, start=start) == alone
    assert take(stream(), 9, workers=1, start=start) == alone


def test_union_over_ranks_is_the_global_order(stream: Make) -> None:
    """2 ranks x 4 prompts take what 1 rank x 8 takes, and no prompt twice in an epoch."""
    ranks = []
    for rank in range(2):
        one = stream(visits=1)
        one.rank, one.world = rank, 2
        ranks.append([[p.id for p in b.prompts] for b in take(one, 4)])
    together = [[p.id for p in b.prompts] for b in take(stream(rollout_size=8, visits=1), 4)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == together


def test_an_epoch_has_every_prompt_once(stream: Make) -> None:
    """FAULTS 44: over ranks and workers, the first epoch of a source is exactly the source."""
    seen: Counter[str] = Counter()
    for rank in range(3):
        one = stream(sizes=(12,), visits=1)
        one.rank, one.world = rank, 3
        seen.update(p.id for b in take(one, 2, workers=2) for p in b.prompts)
    assert seen == Counter({f"a{i}": 2 for i in range(12)})


def test_mixing_weights(stream: Make) -> None:
    domains = Counter(p.domain for b in take(stream(weights=(3, 1), rollout_size=16, visits=1), 10) for p in b.prompts)
    assert abs(domains["a"] - 120) <= 3


def test_bad_rows_met_on_the_way_are_replaced(
    write: Callable[..., str], chats: Callable[..., Any], tokenizer: Callable[..., Any]
) -> None:
    """As in sources too large to be rendered whole at setup: the same for any workers, and all good rows come."""
    rows = [*chats(8), {"id": "long", "prompt": "x" * 200}]
    source = JsonlSource(write(rows))
    source.open()

    def order(workers: int) -> list[list[str]]:
        pool = PromptPool(source, ChatRenderer(tokenizer(), max_prompt_tokens=100), 0, seed=0)
        return [[p.id for p in b.prompts] for b in take(PromptStream([pool], 3, 1, 0), 6, workers)]

    seen = order(0)
    assert seen == order(2)
    assert {name for names in seen[:3] for name in names} == {f"p{i}" for i in range(8)}


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_bad_rows_is_an_error_not_a_hang(
    write: Callable[..., str], tokenizer: Callable[..., Any], workers: int
) -> None:
    source = JsonlSource(write([{"prompt": "x" * 50}] * 5))
    source.open()
    pool = PromptPool(source, ChatRenderer(tokenizer(), max_prompt_tokens=10), 0, seed=0)
    with pytest.raises(DataError, match="longer than max_prompt_tokens"):
        take(PromptStream([pool], 2, 1, 0), 1, workers)


def test_loading_does_not_move_the_global_generator(stream: Make) -> None:
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    take(stream(), 2, workers=2)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_leave_signals_to_the_main_process(stream: Make) -> None:
    """A scheduler signals the whole process group: workers must go on until the main process has saved."""
    batches = iter(CursorLoader(stream(), lambda _: None, 2))
    first = [next(batches) for _ in range(2)]
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert first + [next(batches) for _ in range(6)] == take(stream(), 8)


@pytest.mark.parametrize(("files", "workers"), [(1, 2), (3, 2), (2, 5)])  # also more workers than files
def test_union_over_ranks_and_workers_is_exactly_the_data(
    write: Callable[..., str], chats: Callable[..., Any], tokenizer: Callable[..., Any], files: int, workers: int
) -> None:
    """FAULTS 44: 101 rows, 2 ranks; every row once an epoch, none twice, whatever reads them."""
    rows = chats(101)
    paths = [write(rows[part::files], f"part{part}.jsonl") for part in range(files)]
    source = JsonlSource(paths, domain="x")
    source.open()
    ranks = []
    for rank in range(2):
        one = PromptStream([PromptPool(source, ChatRenderer(tokenizer()), 0, seed=0)], 4, 1, seed=0)
        one.rank, one.world = rank, 2
        ranks.append(take(one, 26, workers))
    order = [prompt.id for both in zip(*ranks, strict=True) for batch in both for prompt in batch.prompts]
    assert Counter(order[:101]) == Counter(f"p{i}" for i in range(101))
    assert Counter(order[101:202]) == Counter(f"p{i}" for i in range(101)) and order[:101] != order[101:202]
