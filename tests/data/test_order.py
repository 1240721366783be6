"""The order of samples: shares as asked, every row once an epoch, any index at once."""

from __future__ import annotations

from collections import Counter

import pytest

from adaflash.data.order import CHUNK, Mixer, Shuffle, quotas


@pytest.mark.parametrize(
    "weights", [[1.0], [1, 1, 1], [3, 1], [1e-9, 1], [0.5, 0.3, 0.2], [1] * CHUNK, [1000, *[1e-6] * 50]]
)
def test_quotas_fill_a_chunk(weights: list[float]) -> None:
    counts = quotas(weights)
    assert sum(counts) == CHUNK
    assert min(counts) >= 1


def test_shares_follow_the_weights_in_any_stretch() -> None:
    mixer = Mixer([2, 1, 1], seed=3)
    for start in (0, 40, 1000, 10**9):
        count = Counter(mixer.locate(i)[0] for i in range(start, start + 64))
        assert abs(count[0] - 32) <= 3
        assert abs(count[1] - 16) <= 3


def test_every_source_counts_its_samples_without_gaps() -> None:
    mixer = Mixer([5, 2, 1], seed=0)
    seen: dict[int, list[int]] = {}
    for i in range(3 * CHUNK):
        source, k = mixer.locate(i)
        seen.setdefault(source, []).append(k)
    assert all(ks == list(range(len(ks))) for ks in seen.values())


def test_any_index_without_those_before_it() -> None:
    straight = Mixer([1, 2], seed=7)
    ahead = [straight.locate(i) for i in range(3000)]
    assert [Mixer([1, 2], seed=7).locate(i) for i in (2999, 5, 1024)] == [ahead[2999], ahead[5], ahead[1024]]


def test_seeds_differ() -> None:
    def order(seed: int) -> list[int]:
        return [Mixer([1, 1], seed).locate(i)[0] for i in range(64)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    shuffle = Shuffle(50, seed=1, source=0)
    first, second = [shuffle(k) for k in range(50)], [shuffle(k) for k in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [Shuffle(50, seed=1, source=1)(k) for k in range(50)]
    assert [shuffle(49, step) for step in range(50)] == [first[49], *first[:49]]


def test_the_order_is_the_same_everywhere() -> None:
    """Written down once: a change of library or machine must not move it, or resumed runs would change their data."""
    assert [Shuffle(10, seed=0, source=0)(k) for k in range(10)] == [3, 7, 4, 2, 9, 8, 1, 6, 5, 0]
    assert [Mixer([1, 1, 2], seed=0).locate(i)[0] for i in range(12)] == [2, 2, 1, 0, 1, 2, 2, 0, 1, 2, 2, 0]


@pytest.mark.parametrize(
    ("weights", "wanted"), [([1.0], [101]), ([1.0, 1.0], [5, 5]), ([3, 1], [40, 2000]), ([2, 1, 1], [0, 7, 3000])]
)
def test_samples_until_every_source_has_given_enough(weights: list[float], wanted: list[int]) -> None:
    mixer = Mixer(weights, seed=5)
    given = [0] * len(weights)
    for number in range(20_000):
        if all(have >= need for have, need in zip(given, wanted, strict=True)):
            break
        given[mixer.locate(number)[0]] += 1
    assert mixer.samples(wanted) == number
