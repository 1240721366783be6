"""Proof A for sampled text: the keyed sampler's text is transformers' own, with and without a drafter, at any size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from proof import POLICIES, Pair, assert_same, rounding, sampled, splitmix_uniform

from adaflash.decoding.engine import Engine
from adaflash.decoding.sampling import best_tokens, uniform
from adaflash.types import Request

LONG = 16
HOW = {
    "T=0.6": Request((), LONG, temperature=0.6, seed=5),
    "T=1": Request((), LONG, temperature=1.0, seed=-3),
    "T=1 top-k": Request((), LONG, temperature=1.0, top_k=5, seed=2**62),
    "T=0.9 top-p": Request((), LONG, temperature=0.9, top_p=0.8, seed=11),
    "T=0.7 both": Request((), LONG, temperature=0.7, top_k=9, top_p=0.9, seed=12),
}
FAMILIES = ("llama", "gemma3_text")


@cache
def pair(family: str) -> Pair:
    return Pair(family, count=4, length=4, dtype=torch.float64)


@cache
def texts(family: str, how: str) -> tuple[Request, dict[tuple[int, ...], list[int]]]:
    """Sampled texts of the oracle no decision of which is near to flipping (else another seed), and their request."""
    its = pair(family)
    for shift in range(20):
        request = replace(HOW[how], seed=HOW[how].seed + shift)
        made = {prompt: sampled(its.oracle, replace(request, prompt=prompt)) for prompt in its.wanted}
        noise = rounding(its.oracle, [[*p, *r] for p, (r, _) in made.items()])
        if min(margin for _, margin in made.values()) > 100 * noise / request.temperature:
            return request, {prompt: response for prompt, (response, _) in made.items()}
    raise AssertionError("no seed has clear margins")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize(("policy", "lanes"), [(None, 3), ("full", 1), ("random", 3), ("confident", 8)])
def test_sampled_text_is_the_same_with_and_without_drafter(
    family: str, how: str, policy: str | None, lanes: int
) -> None:
    its = pair(family)
    request, wanted = texts(family, how)
    its.wanted = wanted
    drafter = its.scripted() if policy else None
    engine = Engine(its.target, drafter, POLICIES[policy]() if policy else None, lanes=lanes)
    results = assert_same(engine, its.oracle, wanted, request)
    if policy == "full":
        assert sum(int(each.blocks.accepted.sum()) for each in results) > LONG


def test_one_batch_may_mix_temperatures_and_seeds() -> None:
    its = pair("llama")
    parts = [texts("llama", how) for how in HOW]
    prompt = next(iter(its.wanted))
    requests = [replace(request, prompt=prompt) for request, _ in parts]
    results = Engine(its.target, lanes=8).generate(requests)
    assert [each.response.tolist() for each in results] == [wanted[prompt] for _, wanted in parts]


def test_noise_is_splitmix_and_never_an_end() -> None:
    pairs = [(s, p) for s in (0, 1, -1, 7, 2**63 - 1, -(2**63)) for p in (0, 1, 500, 2**31)]
    seeds, places = (torch.tensor(column) for column in zip(*pairs, strict=True))
    got = uniform(seeds, places)
    assert got.tolist() == [splitmix_uniform(s, p) for s, p in pairs]
    many = uniform(torch.arange(100_000), torch.full((100_000,), 3))
    assert float(many.min()) > 0 and float(many.max()) < 1


@pytest.mark.parametrize("vocabulary", [5, 127, 128, 300, 1024])
def test_best_tokens_are_argmax(vocabulary: int) -> None:
    """Ties go to the first, as argmax does; rows of -inf and of one shape or another included."""
    logits = torch.randint(0, 4, (50, vocabulary), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = float("-inf")
    assert torch.equal(best_tokens(logits), logits.argmax(-1))
    assert torch.equal(best_tokens(logits.view(5, 10, -1)), logits.view(5, 10, -1).argmax(-1))
    assert best_tokens(logits[:0]).shape == (0,)


def test_greedy_is_the_limit_of_low_temperature() -> None:
    its = Pair("llama", count=3, length=LONG, dtype=torch.float64)
    assert_same(Engine(its.target), its.oracle, its.wanted, Request((), LONG, temperature=1e-4))
