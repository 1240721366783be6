"""Proof A: greedy output equals the target's own greedy decoding, token for token, whatever drafts and however long."""

from __future__ import annotations

import pytest
import tiny
import torch

from adaflash.decoding.engine import Engine
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import LengthPolicy
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.types import Proposal, Request

LONG = 24


class RandomLength(LengthPolicy):
    """Any length at all."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def choose(self, proposal: Proposal) -> torch.Tensor:
        return torch.randint(0, 9, proposal.limits.shape, generator=self.generator)


def adaptive() -> LengthPolicy:
    policy = AdaptiveLength()
    policy.build(64, 8)
    return policy


POLICIES = {"full": FullBlock, "fixed": lambda: FixedLength(3), "random": RandomLength, "adaptive": adaptive}


def same(engine: Engine, model: object, wanted: dict[tuple[int, ...], list[int]], count: int) -> None:
    """Compare with the oracle; on a difference say where, and how close the race was."""
    results = engine.generate([Request(prompt, count) for prompt in wanted])
    for (prompt, response), result in zip(wanted.items(), results, strict=True):
        got = result.response.tolist()
        if got != response:
            at = next(i for i, (a, b) in enumerate(zip([*got, None], [*response, None], strict=False)) if a != b)
            close = tiny.margin(model, [*prompt, *response[: at + 1]], len(prompt) + at)  # type: ignore[arg-type]
            pytest.fail(f"position {len(prompt) + at}: {got[at:at+1]} instead of {response[at:at+1]}, margin {close:.2e}")


@pytest.fixture(scope="module", params=sorted(tiny.FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple:
    """A target, its oracle, and greedy responses whose margins are far above rounding."""
    for seed in range(20):
        model = tiny.model(request.param, seed)
        oracle = tiny.oracle(model)
        wanted = {p.tokens: tiny.greedy(oracle, p.tokens, LONG) for p in tiny.prompts(7, seed=seed)}
        closest = min(tiny.margin(oracle, [*p, *r], len(p)) for p, r in wanted.items())
        if closest > 100 * rounding(oracle, wanted):
            return tiny.HFTarget(model), oracle, wanted
    raise AssertionError("no seed has clear margins")


def rounding(model, wanted) -> float:  # noqa: ANN001
    """How far logits move between a read of one token at a time and of many."""
    worst = 0.0
    with torch.no_grad():
        for prompt, response in list(wanted.items())[:2]:
            tokens = [*prompt, *response]
            whole = model(torch.tensor([tokens])).logits[0]
            short = model(torch.tensor([tokens[: len(prompt) + 1]])).logits[0]
            worst = max(worst, float((whole[: len(short)] - short).abs().max()))
    return worst


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_greedy_text_is_the_targets_own(family: tuple, policy: str, lanes: int) -> None:
    target, oracle, wanted = family
    same(Engine(target, tiny.drafter(target, noise=0.05), POLICIES[policy](), lanes=lanes), oracle, wanted, LONG)


def test_plain_decoding_too(family: tuple) -> None:
    target, oracle, wanted = family
    same(Engine(target, lanes=3), oracle, wanted, LONG)


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_exact_length(family: tuple, count: int) -> None:
    target, oracle, wanted = family
    engine = Engine(target, tiny.drafter(target, noise=0.05), lanes=3)
    same(engine, oracle, {p: r[:count] for p, r in wanted.items()}, count)
