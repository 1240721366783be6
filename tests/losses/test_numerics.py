"""The fast argmax is the slow one; entries of the KL never fall below zero; rows and groups are cut where they say."""

import math

import pytest
import torch

from adaflash.losses.numerics import FLOOR, argmax_rows, kl_entries, log_probs
from adaflash.losses.rows import Rows


@pytest.mark.parametrize("size", [5, 256, 512, 700, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_argmax_with_many_ties(size, dtype):
    torch.manual_seed(0)
    for spread in (2, 10_000):
        logits = torch.randint(spread, (40, size)).to(dtype)
        top, index = argmax_rows(logits)
        assert torch.equal(index, logits.argmax(-1)) and torch.equal(top, logits.amax(-1))


@pytest.mark.parametrize("place", [3, 300, 699])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_argmax_hands_on_what_is_not_finite(place, value):
    logits = torch.randn(2, 700)
    logits[1, place] = value
    top, index = argmax_rows(logits)
    assert index[1] == place and not top[1].isfinite() and top[0].isfinite()
    top, _ = argmax_rows(torch.full((1, 700), -math.inf))
    assert top[0] == -math.inf


def test_no_entry_of_the_kl_is_negative_however_near():
    gaps = torch.cat([torch.zeros(1), torch.logspace(-12, 3, 4000)])
    log_p = torch.tensor([-1e-3, -1.0, -20.0, FLOOR])[:, None].expand(4, 4001)
    for sign in (1, -1):
        entries = kl_entries(log_p, (log_p + sign * gaps).clamp(max=0))
        assert (entries >= 0).all() and entries.isfinite().all()
        assert (entries[:, 0] == 0).all()


def test_the_floor():
    log_p = log_probs(torch.tensor([[0.0, -math.inf, -1e9]]), "x")
    assert log_p.tolist() == [[0.0, FLOOR, FLOOR]]


def rows(position):
    position = torch.tensor(position)
    count = len(position)
    return Rows(torch.arange(count), torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64), position)


@pytest.mark.parametrize(
    ("position", "limit", "expected"),
    [
        ([0, 0, 1, 2, 2, 2, 3], 100, [(0, 7)]),
        ([0, 0, 1, 2, 2, 2, 3], 2, [(0, 2), (2, 6), (6, 7)]),
        ([0, 1, 2, 3, 4], 2, [(0, 2), (2, 4), (4, 5)]),
        ([0] * 6 + [1] * 3, 4, [(0, 6), (6, 9)]),  # one position has more rows than a chunk
        ([0] * 3 + [1] * 3 + [2] * 3, 4, [(0, 6), (6, 9)]),  # 9 rows would start a third chunk
        ([], 4, []),
    ],
)
def test_groups_never_cut_a_position(position, limit, expected):
    assert list(rows(position).groups(limit)) == expected


def test_groups_cover_everything_within_the_limit():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        position = torch.randint(12, (40,), generator=generator).sort().values
        limit = int(torch.randint(1, 15, (), generator=generator))
        groups = list(rows(position.tolist()).groups(limit))
        assert [start for start, _ in groups] == [0, *[end for _, end in groups][:-1]] and groups[-1][1] == 40
        for start, end in groups:
            assert 1 <= len(position[start:end].unique()) <= limit
            assert start == 0 or position[start] != position[start - 1]


def test_chunks_are_even():
    assert list(rows([0] * 10).chunks(4)) == [(0, 3), (3, 6), (6, 10)]
    assert list(rows([0] * 8).chunks(4)) == [(0, 4), (4, 8)]
    assert list(rows([]).chunks(4)) == []
