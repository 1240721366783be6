"""What the rule is worth where the head is right: rounds are simulated, seconds are the table's, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from length_costs import table
from torch import Tensor

from adaflash.length.base import LengthPolicy, Round
from adaflash.length.confidence import Confidence
from adaflash.length.cost_aware import CostAware
from adaflash.length.cost_table import CostTable
from adaflash.length.fixed import FixedLength
from adaflash.types import Proposal

B, CONTEXT = 16, 100
# Costs of a pass over n tokens: SmolLM2 on two cores, a steeper machine, and a GPU that is flat up to its knee.
COSTS: dict[str, Callable[[int], float]] = {
    "cpu": lambda n: 1 + n / 22,
    "steep": lambda n: 1 + n / 6,
    "gpu": lambda n: max(1.0, n / 128),
    "stairs": lambda n: 1 + (n - 1) // 16 * 0.7,
}


class Knowing(CostAware):
    """Its head is right: the states are the survivals themselves."""

    def survival(self, proposal: Proposal) -> Tensor:
        return proposal.hidden[:, 1:, 0]


def play(policy: LengthPolicy, costs: CostTable, load: int, rounds: int, quality: float = 1.0) -> float:
    """Tokens a modelled second, over rounds of blocks that are easy, middling or hopeless; the same for every policy."""
    rng = torch.Generator().manual_seed(0)
    committed, seconds = 0, 0.0
    for _ in range(rounds):
        hazards = torch.tensor([0.95, 0.7, 0.1])[torch.randint(0, 3, (load,), generator=rng)][:, None] * quality
        hazards = hazards.expand(load, B - 1)
        lucky = torch.rand(load, B - 1, generator=rng) < hazards
        if not policy.drafts(load):
            committed, seconds = committed + load, seconds + costs.seconds(load, load, CONTEXT)
            policy.observe(Round(load, 0, load, load, CONTEXT))
            continue
        hidden = torch.cat([torch.zeros(load, 1, 1), hazards.cumprod(1)[..., None]], 1)
        full = torch.full((load,), B - 1)
        lengths = policy.choose(Proposal(hidden, full, probability=hazards, anchors=full * 0 + CONTEXT))
        accepted = torch.minimum(lucky.long().cumprod(1).sum(1), lengths)
        done = Round(load, load, load + int(lengths.sum()), load + int(accepted.sum()), CONTEXT)
        policy.observe(done)
        committed += done.committed
        seconds += costs.draft_seconds(load, CONTEXT) + costs.seconds(done.rows, load, CONTEXT)
    return committed / seconds


def knowing(costs: CostTable, fall_back: bool) -> CostAware:
    made = Knowing(fall_back)
    made.use(costs)
    return made


@pytest.mark.parametrize("load", [1, 4, 16, 32])
@pytest.mark.parametrize("machine", sorted(COSTS))
def test_survival_and_cost_is_at_least_as_good_as_any_fixed_length(machine: str, load: int) -> None:
    costs = table(B, COSTS[machine], lambda r: 0.2 + 0.01 * r)
    rounds = 600 // load + 50
    fixed = {length: play(FixedLength(length), costs, load, rounds) for length in (1, 2, 3, 5, 7, 11, 15)}
    confident = max(play(Confidence(theta), costs, load, rounds) for theta in (0.1, 0.3, 0.5))
    ours = play(knowing(costs, fall_back=False), costs, load, rounds)
    assert ours >= 0.99 * max(fixed.values()), (max(fixed, key=fixed.__getitem__), ours, fixed)
    assert ours >= 0.97 * confident
    plain = load / costs.seconds(load, load, CONTEXT)
    assert play(knowing(costs, fall_back=True), costs, load, rounds) >= 0.96 * max(plain, ours)


def test_at_the_highest_load_that_pays_it_beats_the_full_block_by_the_papers_factor() -> None:
    """12 requests on the CPU's costs: 1.88 here; at 16 no fixed length is faster than plain steps any more."""
    costs = table(B, COSTS["cpu"], lambda r: 0.2 + 0.01 * r)
    full, ours = (play(policy, costs, 12, 60) for policy in (FixedLength(15), knowing(costs, False)))
    assert play(FixedLength(3), costs, 12, 60) > 12 / costs.seconds(12, 12, CONTEXT)
    assert ours > 1.66 * full


@pytest.mark.parametrize("load", [1, 4, 16, 32])
@pytest.mark.parametrize("quality", [0.0, 0.3])
def test_never_slower_than_plain_with_a_drafter_that_is_no_good(load: int, quality: float) -> None:
    """Untrained, or made for other text: by no more than 4 %, probes and the first rounds counted."""
    costs = table(B, COSTS["cpu"], lambda r: 0.2 + 0.01 * r)
    plain = load / costs.seconds(load, load, CONTEXT)
    assert play(knowing(costs, True), costs, load, 1500, quality) > 0.96 * plain
