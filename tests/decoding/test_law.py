"""Proof C: the law of sampled text, by exact enumeration and by chi-square tests that are shown to have power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
import tiny
import torch
from proof import Confident
from torch import Tensor

from adaflash.decoding import verify
from adaflash.decoding.engine import Engine
from adaflash.decoding.sampling import DRAFT, choose_tokens, filtered_probabilities, inverse_cdf, law, uniform
from adaflash.decoding.verify import Draft, judge, residual
from adaflash.errors import UserError
from adaflash.types import Request

V = 8
LOGITS = torch.tensor([[0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.5, 0.0]])
SAMPLERS = [
    Request((), 1, temperature=1.0),
    Request((), 1, temperature=0.7, top_k=3, top_p=0.8),
    Request((), 1, temperature=1.3, top_p=0.9),
]


def p_value(counts: Tensor, law: Tensor) -> float:
    """Chi-square test of counts against a law; cells that expect fewer than 5 are taken together."""
    expected = law.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    assert float(counts[expected == 0].sum()) == 0, "a token of no probability was chosen"
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def counted(tokens: Tensor, cells: int = V) -> Tensor:
    return torch.bincount(tokens, minlength=cells)


# ---- the keyed sampler ----


@pytest.mark.parametrize("request_", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keyed_sampler_over_positions_seeds_and_neighbours(request_: Request, dtype: torch.dtype) -> None:
    n = 40_000
    logits = LOGITS.to(dtype).expand(n, V)
    p = filtered_probabilities(LOGITS.to(dtype), request_.temperature, request_.top_k, request_.top_p)[0]
    along = choose_tokens(logits, torch.arange(n), request_)
    assert p_value(counted(along), p) > 1e-3
    pairs = counted(along[:-1] * V + along[1:], V * V)
    assert p_value(pairs, (p[:, None] * p).flatten()) > 1e-3
    over_seeds = inverse_cdf(law(logits, request_), uniform(torch.arange(n), torch.full((n,), 9)))
    assert p_value(counted(over_seeds), p) > 1e-3


def test_the_tests_above_have_power() -> None:
    """A temperature that is off by 5 %, noise used twice, and noise shared by two uses are all found."""
    n = 40_000
    request = SAMPLERS[0]
    p = filtered_probabilities(LOGITS, 1.0)[0]
    warm = choose_tokens(LOGITS.expand(n, V) / 1.05, torch.arange(n), request)
    assert p_value(counted(warm), p) < 1e-6
    twice = choose_tokens(LOGITS.expand(n, V), torch.arange(n) // 2, request)
    assert p_value(counted(twice[:-1] * V + twice[1:], V * V), (p[:, None] * p).flatten()) < 1e-6


def test_uses_of_noise_are_independent() -> None:
    n = 40_000
    seeds, places = torch.full((n,), 4), torch.arange(n)
    cells = [(uniform(seeds, places, use) * V).long() for use in range(4)]
    for a, b in [(0, 1), (1, 2), (2, 3), (0, 3)]:
        assert p_value(counted(cells[a] * V + cells[b], V * V), torch.full((V * V,), 1 / V**2)) > 1e-3


def test_filters_by_hand() -> None:
    """T = 1 keeps mass in order: top-k 2 of (.5, .3, .2) is (.625, .375); top-p .6 needs two tokens, .5 one."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert filtered_probabilities(logits, 1.0, top_k=2).tolist()[0] == pytest.approx([0.625, 0.375, 0])
    assert filtered_probabilities(logits, 1.0, top_p=0.6).tolist()[0] == pytest.approx([0.625, 0.375, 0])
    assert filtered_probabilities(logits, 1.0, top_p=0.45).tolist()[0] == pytest.approx([1, 0, 0])


# ---- rejection sampling ----


def outcome(p: Tensor, q: Tensor, verified: Iterable[int] = range(V)) -> Tensor:
    """Exact law of the next token: d from q, accepted with min(1, p / q), else from the residual; unverified: from p."""
    law = torch.zeros(V, dtype=torch.float64)
    rest = residual(p[None], q[None])[0]
    for d in range(V):
        if d in verified:
            ratio = min(1.0, float(p[d] / q[d])) if q[d] > 0 else 1.0
            law[d] += q[d] * ratio
            law += q[d] * (1 - ratio) * rest / rest.sum()
        else:
            law += q[d] * p
    return law


def laws(seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.randn(2, V, generator=torch.Generator().manual_seed(seed)).double()
    return (noise[0] * 1.5).softmax(0), (noise[1] * 1.5).softmax(0)


@pytest.mark.parametrize("seed", range(5))
def test_one_step_by_enumeration(seed: int) -> None:
    p, q = laws(seed)
    torch.testing.assert_close(outcome(p, q), p, atol=1e-14, rtol=0)
    torch.testing.assert_close(outcome(p, p), p, atol=1e-14, rtol=0)


def test_a_length_that_looks_at_the_candidate_changes_the_law() -> None:
    """Why policies that need logits are refused: a threshold on q(d) is off by several per cent, exactly computed."""
    shifts = []
    for seed in range(20):
        p, q = laws(seed)
        likely = [d for d in range(V) if q[d] > 0.2]
        shifts.append(float((outcome(p, q, likely) - p).abs().sum() / 2))
    assert sum(shifts) / len(shifts) > 0.02
    target = tiny.target("llama")
    with pytest.raises(UserError, match="Confident looks at the drafted candidates"):
        Engine(target, tiny.drafter(target), Confident(), verification="rejection")


def test_judge_accepts_exactly_below_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = laws(1)
    request = Request((), 1, temperature=1.0)
    d = int((q / p).argmax())
    for u, accepted in ((float(p[d] / q[d]) - 1e-9, 1), (float(p[d] / q[d]) + 1e-9, 0)):
        monkeypatch.setattr(verify, "noise_at", lambda *_, u=u: torch.tensor([u], dtype=torch.float64))
        draft = Draft([d], [d], q[None])
        assert judge(request, draft, p.log()[None].repeat(2, 1), 5).accepted == accepted


SPREAD = Request((1, 5, 2), 3, temperature=6.0, top_p=0.98)


def text_law(oracle: torch.nn.Module, request: Request) -> Tensor:
    """Exact probability of every response of three tokens, [V^3]."""
    texts = torch.tensor([[*request.prompt, *text] for text in product(range(V), repeat=3)])
    with torch.no_grad():
        logits = oracle(texts).logits[:, len(request.prompt) - 1 : -1]
    p = filtered_probabilities(logits.reshape(-1, V), request.temperature, request.top_k, request.top_p)
    p = p.reshape(*logits.shape)
    return p.gather(-1, texts[:, len(request.prompt) :, None]).squeeze(-1).prod(-1)


def text_counts(engine: Engine, n: int) -> Tensor:
    results = engine.generate([replace(SPREAD, seed=seed) for seed in range(n)])
    assert not any(each.error for each in results)
    accepted = sum(int(each.blocks.accepted.sum()) for each in results)
    sent = sum(int(each.blocks.lengths.sum()) for each in results)
    if engine.drafter is not None:
        assert 0.1 < accepted / sent < 0.9  # both ways out are taken
    cells = Counter(int(a) * 64 + int(b) * 8 + int(c) for a, b, c in (each.response for each in results))
    return torch.tensor([cells[i] for i in range(V**3)])


@pytest.fixture(scope="module")
def small() -> tuple:
    """A target of eight words, its oracle, a drafter unlike it, and the law of its texts."""
    model = tiny.model("llama", seed=3, vocab_size=V)
    target = tiny.HFTarget(model)
    drafter = tiny.drafter(target, block_size=3, noise=0.05, mask_id=V - 1)
    oracle = tiny.oracle(model)
    return target, drafter, text_law(oracle, SPREAD)


def test_rejection_sampling_follows_the_targets_law(small: tuple) -> None:
    target, drafter, truth = small
    engine = Engine(target, drafter, lanes=200, verification="rejection")
    assert p_value(text_counts(engine, 1500), truth) > 1e-3


def test_exact_match_follows_the_targets_law(small: tuple) -> None:
    target, _, truth = small
    assert p_value(text_counts(Engine(target, lanes=200), 1500), truth) > 1e-3


@pytest.mark.parametrize("fault", ["residual", "shared noise"])
def test_wrong_rejection_sampling_is_found(small: tuple, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test with as many texts finds the target's law as residual, and noise that is used twice."""
    target, drafter, truth = small
    if fault == "residual":
        monkeypatch.setattr(verify, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(verify, "ACCEPT", DRAFT)
    engine = Engine(target, drafter, lanes=200, verification="rejection")
    assert p_value(text_counts(engine, 1500), truth) < 1e-3


def test_rejection_sampling_is_reproducible_and_greedy_stays_greedy(small: tuple) -> None:
    target, drafter, _ = small
    requests = [replace(SPREAD, seed=s, max_new_tokens=9, temperature=t) for s in range(6) for t in (0.0, 4.0)]
    texts = [
        [
            each.response.tolist()
            for each in Engine(target, drafter, lanes=n, verification="rejection").generate(requests)
        ]
        for n in (1, 5)
    ]
    assert texts[0] == texts[1]
    plain = [each.response.tolist() for each in Engine(target).generate(requests)]
    assert texts[0][::2] == plain[::2] and texts[0][1::2] != plain[1::2]
