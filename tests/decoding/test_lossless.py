"""Proof A: greedy text equals the target's own greedy decoding, token for token, whatever drafts and however long."""

from __future__ import annotations

from functools import cache

import pytest
import tiny
import torch
from proof import BLOCK, POLICIES, Pair, assert_same

from adaflash.decoding.engine import Engine
from adaflash.types import Request

LONG = 20


@cache
def pair(family: str) -> Pair:
    return Pair(family, count=5, length=LONG)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@pytest.mark.parametrize(
    ("policy", "lanes", "layout"),
    [("full", 1, "auto"), ("random", 3, "packed"), ("random", 8, "padded"), ("adaptive", 3, "auto")],
)
def test_every_family(family: str, policy: str, lanes: int, layout: str) -> None:
    its = pair(family)
    engine = Engine(its.target, its.scripted(), POLICIES[policy](), lanes=lanes, layout=layout)
    results = assert_same(engine, its.oracle, its.wanted, Request((), LONG))
    if policy != "adaptive":  # an untrained head may send nothing
        assert sum(int(each.blocks.accepted.sum()) for each in results) > LONG


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_plain_and_with_a_real_drafter(family: str) -> None:
    its = pair(family)
    assert_same(Engine(its.target, lanes=3), its.oracle, its.wanted, Request((), LONG))
    engine = Engine(its.target, tiny.drafter(its.target, BLOCK, noise=0.05), lanes=3)
    assert_same(engine, its.oracle, its.wanted, Request((), LONG))


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_and_number_of_lanes(policy: str, lanes: int) -> None:
    its = pair("qwen3")
    engine = Engine(its.target, its.scripted(), POLICIES[policy](), lanes=lanes, all_candidates=lanes == 3)
    assert_same(engine, its.oracle, its.wanted, Request((), LONG))


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_exact_length(count: int, accuracy: float) -> None:
    its = pair("llama")
    wanted = {p: r[:count] for p, r in its.wanted.items()}
    results = assert_same(Engine(its.target, its.scripted(accuracy), lanes=3), its.oracle, wanted, Request((), count))
    for each in results:
        assert each.finish == "length"
        assert int(each.blocks.committed.sum()) + each.plain_steps == count - 1


def test_one_token_prompts() -> None:
    its = pair("qwen3")
    wanted = {(t,): tiny.greedy(its.oracle, (t,), BLOCK + 1) for t in (3, 50, 91)}
    assert_same(
        Engine(its.target, tiny.drafter(its.target, BLOCK), lanes=2), its.oracle, wanted, Request((), BLOCK + 1)
    )


def stop_at(its: Pair, index: int) -> tuple[tuple[int, ...], int]:
    """A prompt whose response has a token for the first time at `index`, and that token."""
    return next((p, r[index]) for p, r in its.wanted.items() if r.index(r[index]) == index)


@pytest.mark.parametrize(("index", "accepted"), [(0, None), (1, 1), (4, 4), (BLOCK - 1, BLOCK - 1), (BLOCK, 7)])
def test_stop_id_first_in_mid_block_last_and_as_the_bonus(index: int, accepted: int | None) -> None:
    """A perfect drafter: candidates sit at 1 .. K of the response, the bonus at K + 1 = BLOCK."""
    its = pair("llama")
    prompt, stop = stop_at(its, index)
    how = Request((), LONG, stop_ids=(96, stop))  # several stop ids
    wanted = {prompt: its.wanted[prompt][: index + 1]}
    (result,) = assert_same(Engine(its.target, its.scripted(1.0)), its.oracle, wanted, how)
    assert result.finish == "stop"
    assert result.blocks.accepted.tolist() == ([] if accepted is None else [accepted])
    assert int(result.blocks.committed.sum()) == index  # counted after the cut


def test_stop_ids_of_the_generation_config_count_too() -> None:
    its = Pair("llama", count=5, length=LONG)
    prompt, stop = stop_at(its, 4)
    its.target.model.generation_config.eos_token_id = [96, stop]
    assert_same(Engine(its.target), its.oracle, {prompt: its.wanted[prompt][:5]}, Request((), LONG))


def test_a_response_may_hold_the_mask_id() -> None:
    its = pair("qwen3")
    drafter = its.scripted()
    drafter.mask_id = next(iter(its.wanted.values()))[3]
    assert_same(Engine(its.target, drafter, lanes=3), its.oracle, its.wanted, Request((), LONG))


def test_context_limit() -> None:
    """Prompts of 57 .. 63 of 64 positions end at the limit; 64 and more are that request's error."""
    its = Pair("qwen3", count=1, length=4, max_position_embeddings=64)
    full = [tuple((7 * i + n) % 90 for i in range(n)) for n in range(57, 66)]
    wanted = {p: tiny.greedy(its.oracle, p, 64 - len(p)) for p in full if len(p) < 64}
    for engine in (Engine(its.target, tiny.drafter(its.target, BLOCK), lanes=4), Engine(its.target, lanes=4)):
        assert_same(engine, its.oracle, wanted, Request((), 50))
        too_long = engine.generate([Request(p, 50) for p in full[-2:]])
        assert [r.finish for r in too_long] == ["error"] * 2 and "holds 64" in too_long[0].error


def test_states_are_the_oracles() -> None:
    """Context of positions 0 .. E - 2 and teacher states of P .. E - 2, whatever was accepted on the way."""
    its = pair("llama")
    engine = Engine(its.target, its.scripted(), POLICIES["random"](), lanes=3, keep_states=True)
    for result in assert_same(engine, its.oracle, its.wanted, Request((), LONG)):
        with torch.no_grad():
            states = its.oracle(result.tokens[None], output_hidden_states=True).hidden_states
        context = torch.cat([states[layer + 1][0] for layer in (0, 2)], dim=-1)[:-1]
        assert result.context is not None and result.teacher is not None
        torch.testing.assert_close(result.context, context, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(result.teacher, states[-1][0, result.prompt_length : -1], atol=1e-3, rtol=1e-3)
