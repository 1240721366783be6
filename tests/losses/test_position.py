"""Position weights by hand."""

import math

import pytest
import torch

from adaflash.losses import DynamicConfidence, ExponentialDecay, FirstMismatch, FirstPass, Uniform

MASK = torch.tensor([[True, True, True], [True, False, False]])


def results(agrees, confidence):
    return FirstPass(torch.zeros_like(MASK, dtype=torch.int64), torch.tensor(agrees), torch.tensor(confidence))


def test_decay_by_hand():
    weights = ExponentialDecay(2.0)(MASK)
    expected = [[1, math.exp(-0.5), math.exp(-1)], [1, 0, 0]]
    assert torch.allclose(weights, torch.tensor(expected)) and weights.dtype == torch.float32


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (8, 3.5), (4, 1.75)])
def test_gamma_follows_the_block(block, gamma):
    mask = torch.ones(1, block - 1, dtype=torch.bool)
    assert torch.allclose(ExponentialDecay()(mask), ExponentialDecay(gamma)(mask))
    assert ExponentialDecay()(mask)[0, 1].item() == pytest.approx(math.exp(-1 / gamma))


def test_uniform():
    assert torch.equal(Uniform()(MASK), MASK.float())


def test_dynamic_confidence_by_hand():
    weight = DynamicConfidence(alpha=0.5)
    found = weight(MASK, results([[True] * 3] * 2, [[1.0, 0.5, 0.0], [0.2, 0.0, 0.0]]))
    # smoothed 1, .75, .5 -> survival 1, .75, .375 -> sums from k on
    assert torch.allclose(found, torch.tensor([[2.125, 1.125, 0.375], [0.6, 0.0, 0.0]]))


def test_first_mismatch_counts_it_and_nothing_after_it():
    given = results([[True, False, True], [False, False, False]], [[0.0] * 3] * 2)
    assert FirstMismatch()(MASK, given).tolist() == [[1, 1, 0], [1, 0, 0]]
    softer = FirstMismatch(ExponentialDecay(2.0), after=0.5)(MASK, given)
    assert torch.allclose(softer, torch.tensor([[1, math.exp(-0.5), 0.5 * math.exp(-1)], [1, 0, 0]]))


@pytest.mark.parametrize(
    "wrong", [lambda: ExponentialDecay(0.0), lambda: DynamicConfidence(0.0), lambda: FirstMismatch(after=2.0)]
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong()
