"""The survival head: its loss by hand, hazards recovered from censored logs, what censors, and where gradients go."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from adaflash.blocks import build_blocks
from adaflash.errors import UserError
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import Outcome
from adaflash.length.confidence import Confidence
from adaflash.length.hazard import at_risk, hazard_loss, known_from_log, survival
from adaflash.length.survival import SurvivalLength, vocabulary_features
from adaflash.types import BlockLog, Proposal, Trajectory

H, B, K = 16, 5, 4


def policy(**settings: object) -> SurvivalLength:
    torch.manual_seed(0)
    made = SurvivalLength(**settings)  # type: ignore[arg-type]
    made.build(H, B)
    return made


def outcome(
    agreed: list[list[int]], known: list[list[int]], full: list[int], hidden: torch.Tensor | None = None
) -> Outcome:
    a, k = torch.tensor(agreed).bool(), torch.tensor(known).bool()
    accepted = (a & k).long().cumprod(1).sum(1).float()
    hidden = torch.randn(len(a), B, H) if hidden is None else hidden
    return Outcome(hidden, accepted, torch.tensor(full).bool(), a, k)


def test_who_is_at_risk_by_hand() -> None:
    agreed = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    known = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    wanted = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert at_risk(agreed, known).long().tolist() == wanted


def test_loss_by_hand() -> None:
    """Block 1: accepted, accepted, rejected. Block 2: accepted, then the response ends."""
    hazards = torch.tensor([[0.9, 0.8, 0.3, 0.5], [0.6, 0.1, 0.1, 0.1]])
    agreed = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()
    known = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    wanted = -(math.log(0.9) + math.log(0.8) + math.log(0.7) + math.log(0.6))
    assert float(hazard_loss(hazards.logit(), agreed, known)) == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(survival(hazards.logit())[0], torch.tensor([0.9, 0.72, 0.216, 0.108]))


def test_the_likelihood_is_that_of_the_acceptance_by_enumeration() -> None:
    """exp(-loss) over all outcomes of a block sums to 1, and gives P(A = n) = S_n (1 - a_{n + 1})."""
    logits = torch.randn(1, K, dtype=torch.float64)
    total = torch.zeros(K + 1, dtype=torch.float64)
    seen = set()
    for row in itertools.product([0, 1], repeat=K):
        agreed = torch.tensor([row]).bool()
        accepted = int(agreed.long().cumprod(1).sum())
        if accepted not in seen:
            seen.add(accepted)
            total[accepted] = (-hazard_loss(logits, agreed, torch.ones_like(agreed))).exp()
    assert float(total.sum()) == pytest.approx(1)
    expected = (total * torch.arange(K + 1)).sum()
    torch.testing.assert_close(survival(logits).sum(), expected)


@pytest.mark.parametrize("censored_by", ["nothing", "the end", "the policy"])
def test_known_hazards_are_recovered(censored_by: str) -> None:
    torch.manual_seed(1)
    count, candidates = 40_000, 6
    kind = torch.randint(0, 3, (count,))
    truth = torch.tensor([0.45, 0.75, 0.97])
    agreed = torch.rand(count, candidates) < truth[kind][:, None]
    known = torch.ones_like(agreed)
    if censored_by == "the end":
        known = torch.arange(candidates) < torch.randint(1, candidates + 1, (count, 1))
    if censored_by == "the policy":  # it sees the kind, and sends long blocks only where they pay
        lengths = torch.where(torch.rand(count) < 0.05, candidates, torch.tensor([1, 3, 6])[kind])
        known = known_from_log(lengths, known)
    logits = torch.zeros(3, candidates, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=60)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = hazard_loss(logits[kind], agreed & known, known) / count
        loss.backward()
        return loss

    optimizer.step(closure)
    got = logits.detach().sigmoid()
    assert (got[:, 0] - truth).abs().max() < 0.02
    assert (got[2] - truth[2]).abs().max() < 0.02  # nearly everybody reaches the last candidate
    if censored_by == "the policy":  # the mean of what such a log shows is not what a full block would give
        shown = (agreed & known).long().cumprod(1).sum(1).float()[kind == 1].mean()
        full = agreed.long().cumprod(1).sum(1).float()[kind == 1].mean()
        assert shown < 0.9 * full
        assert abs(float(survival(logits.detach())[1].sum() - full)) < 0.1


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_near_the_end_candidates_are_censored_not_rejected(finish: str) -> None:
    """A perfect block whose last candidates lie behind the end: nothing says that they would have been rejected."""
    text = Trajectory("t", "a", torch.arange(10), 4, finish, BlockLog.empty(K))
    blocks = build_blocks([text], [torch.tensor([7])], B, mask_id=0)
    agreed = blocks.supervised  # the two candidates that lie inside are right
    assert at_risk(agreed, blocks.supervised).long().tolist() == [[1, 1, 0, 0]]
    logits = torch.zeros(1, K, requires_grad=True)
    hazard_loss(logits, agreed, blocks.supervised).backward()
    assert (logits.grad[0, :2] < 0).all() and (logits.grad[0, 2:] == 0).all()  # type: ignore[index]


def test_no_gradient_reaches_the_states() -> None:
    made = policy()
    hidden = torch.randn(3, B, H)
    result = outcome([[1, 1, 0, 0]] * 3, [[1, 1, 1, 1]] * 3, [1, 1, 0], hidden)
    made.loss(result).backward()
    assert hidden.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())


def test_the_papers_head_learns_beside_it_as_it_does_alone() -> None:
    made, alone = policy(), AdaptiveLength()
    alone.build(H, B)
    alone.head.load_state_dict(made.head.state_dict())
    result = outcome([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], [1, 1, 0])
    both = made.loss(result) - hazard_loss(made.hazard(result.hidden), result.agreed, result.known)
    torch.testing.assert_close(both, alone.loss(result))
    by_hand = ((alone.head(result.hidden)[:2] - torch.tensor([2.0, 5.0]) / B) ** 2).sum()
    torch.testing.assert_close(alone.loss(result), by_hand)
    assert made.counted(result).tolist() == [True] * 3 and alone.counted(result).tolist() == [True, True, False]


@pytest.mark.parametrize("features", [False, True])
def test_it_learns_and_chooses(features: bool) -> None:
    """States that tell how far a block goes: the head finds out, S falls with k, and short blocks are sent short."""
    made = policy(threshold=0.4, vocab_features=features)
    torch.manual_seed(2)
    unembedding = torch.randn(11, H)
    accepted = torch.randint(0, K + 1, (256,))
    hidden = torch.randn(256, B, H) * 0.1
    hidden[torch.arange(256), :, accepted] += 3
    agreed = torch.arange(1, B) <= accepted[:, None]
    known = torch.ones_like(agreed)
    result = Outcome(hidden, accepted.float(), known[:, 0], agreed, known, lambda x: F.linear(x, unembedding))
    optimizer = torch.optim.Adam(made.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        made.loss(result).backward()
        optimizer.step()
    logits = F.linear(hidden[:, 1:], unembedding)
    proposal = Proposal(hidden, torch.full((256,), K), logits=logits if features else None)
    alive = made.survival(proposal)
    assert (alive[:, 1:] <= alive[:, :-1]).all()
    assert (made.choose(proposal) == accepted).float().mean() > 0.95
    forecast = made.forecast(proposal)
    assert forecast.shape == (256, 1 + K)
    assert (forecast[:, 0] - accepted).abs().mean() < 0.3
    assert made.choose(Proposal(hidden, torch.zeros(256).long(), logits=proposal.logits)).sum() == 0


def test_vocabulary_features_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    p = logits.softmax(-1)
    hidden = torch.randn(1, 2, H)
    got = vocabulary_features(Outcome(hidden, *[torch.ones(1)] * 2, *[torch.ones(1, 1)] * 2, lambda _: logits))[0, 0]
    torch.testing.assert_close(got, torch.stack([p.max().log(), -(p * p.log()).sum(), torch.tensor(1.0)]))
    other = vocabulary_features(Outcome(hidden, *[torch.ones(1)] * 2, *[torch.ones(1, 1)] * 2, lambda _: logits + 5))
    torch.testing.assert_close(got, other[0, 0], atol=1e-5, rtol=1e-5)  # logits are known up to a constant


def test_confidence_by_hand() -> None:
    probability = torch.tensor([[0.9, 0.8, 0.5, 0.9], [0.2, 1.0, 1.0, 1.0]])
    proposal = Proposal(torch.empty(2, B, H), torch.tensor([4, 4]), torch.zeros(2, 4), probability)
    assert Confidence(0.35).choose(proposal).tolist() == [3, 0]
    assert Confidence(0.3).choose(proposal).tolist() == [4, 0]
    assert Confidence.needs_logits


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UserError, match="theta"):
        Confidence(0.0)
    with pytest.raises(UserError, match="threshold"):
        SurvivalLength(1.5)


def test_building_twice_keeps_the_weights() -> None:
    made = policy()
    before = made.hazard
    made.build(H, B)
    assert made.hazard is before
