"""The cost-aware choice against brute force, the price of a second, the fall-back, and what a checkpoint keeps."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fitting
import lightning as L
import pytest
import tiny
import torch
from length_costs import table

from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.base import Round
from adaflash.length.cost_aware import CostAware
from adaflash.length.cost_table import CostTable, find, fingerprint, place, rising
from adaflash.length.ledger import BUCKETS, Ledger, bucket
from adaflash.length.scan import best_lengths
from adaflash.module import AdaFlashModule
from adaflash.rollouts.live import LiveRollout
from adaflash.types import Proposal, Request

B = 8
SHAPES: dict[str, Callable[[int], float]] = {
    "linear": lambda n: 1 + 0.1 * n,
    "convex": lambda n: 1 + 0.01 * n * n,
    "concave": lambda n: n**0.5,
    "staircase": lambda n: 1 + (n - 1) // 4,
    "flat": lambda n: 1.0,
}


def brute_force(survival: torch.Tensor, limits: list[int], cost: torch.Tensor, price: float) -> float:
    choices = itertools.product(*(range(limit + 1) for limit in limits))
    return max(value(survival, lengths, cost, price) for lengths in choices)


def value(survival: torch.Tensor, lengths: tuple[int, ...], cost: torch.Tensor, price: float) -> float:
    gained = sum(float(row[:n].double().sum()) for row, n in zip(survival, lengths, strict=True))
    return gained - price * float(cost[sum(lengths)])


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_scan_equals_brute_force(shape: str) -> None:
    rng = torch.Generator().manual_seed(4)
    for case in range(60):
        requests, candidates = 1 + case % 3, 4
        hazards = torch.rand(requests, candidates, generator=rng).sqrt()
        if case % 2:
            hazards = (hazards * 4).round() / 4  # zeros, ones and ties within and between requests
        survival = hazards.cumprod(1)
        limits = torch.randint(0, candidates + 1, (requests,), generator=rng)
        cost = torch.tensor(
            [SHAPES[shape](requests + m) for m in range(requests * candidates + 1)], dtype=torch.float64
        )
        price = float(torch.rand((), generator=rng)) * 3
        got = best_lengths(survival, limits, cost, price)
        assert got.shape == limits.shape and (got <= limits).all() and (got >= 0).all()
        best = brute_force(survival, limits.tolist(), cost, price)
        assert value(survival, tuple(got.tolist()), cost, price) == pytest.approx(best, abs=1e-9)


def test_ties_go_to_the_smaller_candidate_then_to_the_earlier_request_and_to_fewer() -> None:
    survival = torch.full((2, 3), 0.5)
    full = torch.tensor([3, 3])
    stairs = torch.tensor([0.0, 0.1, 0.2, 0.3, 9, 9, 9], dtype=torch.float64)
    assert best_lengths(survival, full, stairs, 1.0).tolist() == [2, 1]  # k = 1 of both, then k = 2 of the first
    free_or_even = torch.tensor([0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0], dtype=torch.float64)
    assert best_lengths(survival, full, free_or_even, 1.0).tolist() == [0, 0]


def test_stopping_at_the_first_fall_would_lose() -> None:
    """A stair of four: the first candidate does not pay alone, four together do."""
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    cost = torch.tensor([1.0, 2, 2, 2, 2], dtype=torch.float64)
    assert best_lengths(survival, torch.tensor([4]), cost, 2.0).tolist() == [4]


def policy(costs: CostTable, hazard: float | None = None, **settings: object) -> CostAware:
    torch.manual_seed(0)
    made = CostAware(**settings)  # type: ignore[arg-type]
    made.build(tiny.FAMILIES["qwen3"]["hidden_size"], B)
    made.use(costs)
    if hazard is not None:
        torch.nn.init.zeros_(made.hazard.out.weight)
        torch.nn.init.constant_(made.hazard.out.bias, float(torch.tensor(hazard).logit()))
    return made


def proposal(requests: int) -> Proposal:
    full = torch.full((requests,), B - 1)
    return Proposal(torch.randn(requests, B, 64), full, anchors=torch.full((requests,), 40))


def test_with_linear_cost_a_candidate_is_sent_iff_it_earns_its_row() -> None:
    made = policy(table(B, lambda n: 1 + n), hazard=0.8)
    price = 1 / (1 + 1)  # nothing booked yet: the rate of plain decoding
    wanted = sum(0.8**k >= price for k in range(1, B))
    assert made.choose(proposal(1)).tolist() == [wanted]
    assert 1 < wanted < B - 1


def test_below_the_knee_the_whole_block_is_sent_without_looking() -> None:
    made = policy(table(B, lambda n: 1 + 0.001 * n), hazard=0.01)
    made.survival = None  # type: ignore[assignment]  # would raise
    assert made.choose(proposal(2)).tolist() == [B - 1] * 2


def test_lambda_settles_at_the_best_rate_there_is() -> None:
    """Rounds commit what the head foresees: the price converges to the largest (1 + G(m)) / (D + T(1 + m))."""
    costs = table(B, lambda n: 1 + 0.3 * n)
    made = policy(costs, hazard=0.75, fall_back=False)
    alive = 0.75 ** torch.arange(1, B, dtype=torch.float64)
    rates = [(1 + float(alive[:m].sum())) / (0.3 + costs.seconds(1 + m, 1, 40)) for m in range(B)]
    rng, lengths = random.Random(0), []
    for _ in range(1500):
        length = int(made.choose(proposal(1)))
        accepted = next((k for k in range(length) if rng.random() > 0.75), length)
        made.observe(Round(1, 1, 1 + length, 1 + accepted, 40))
        lengths.append(length)
    assert max(set(lengths[500:]), key=lengths[500:].count) == rates.index(max(rates))
    assert made.ledger.price(1, 0.0) == pytest.approx(max(rates), rel=0.1)


def played(made: CostAware, rounds: int, committed: Callable[[int], int], load: int = 4) -> int:
    """Rounds as the engine plays them; how many were drafted."""
    drafted = 0
    for i in range(rounds):
        if made.drafts(load):
            lengths = made.choose(proposal(load))
            made.observe(Round(load, load, load + int(lengths.sum()), committed(i) * load, 40))
            drafted += 1
        else:
            made.observe(Round(load, 0, load, load, 40))
    return drafted


def test_a_drafter_that_is_never_right_is_dropped_at_once_and_probed_one_round_in_64() -> None:
    made = policy(table(B, lambda n: 0.5 + 0.5 * n), hazard=0.9)
    assert played(made, 16, lambda i: 1) <= 5
    assert played(made, 640, lambda i: 1) == 10
    assert not made.drafts(4) and made.drafts(1) and made.drafts(8)  # every load has its own books
    assert not made.drafts(3)  # 3 and 4 share them


def test_a_drafter_that_pays_is_never_dropped_and_one_that_gets_better_is_taken_up_again() -> None:
    made = policy(table(B, lambda n: 5 + 0.1 * n), hazard=0.9)
    assert played(made, 200, lambda i: 3) == 200
    assert played(made, 800, lambda i: 1) < 400  # the traffic has changed
    assert not made.drafts(4)
    played(made, 64 * 12, lambda i: 5)
    assert played(made, 50, lambda i: 5) == 50


def test_hysteresis() -> None:
    ledger = Ledger(probe_every=4, hysteresis=1.05)
    for _ in range(30):
        ledger.drafted(1, 9, 1.0, 10.0)
    assert ledger.gain(1) == pytest.approx(0.9) and not ledger.wants_draft(1)
    ledger.stepped(1)
    ledger.stepped(1)
    assert not ledger.wants_draft(1)
    ledger.stepped(1)
    assert ledger.wants_draft(1)  # a probe
    ledger.drafted(1, 1030, 1.0, 1000.0)
    assert ledger.gain(1) > 1 and not ledger.wants_draft(1)  # better than plain, but not by enough
    ledger.drafted(1, 1200, 1.0, 1000.0)
    assert ledger.wants_draft(1)


def test_drafting_is_not_given_up_for_a_few_unlucky_rounds() -> None:
    """A gain of 1.1 whose rounds bring 0 to 7 candidates: seldom given up; one of 0.9 nearly always."""
    rng, dropped = random.Random(0), {1.1: 0, 0.9: 0}
    for mean in dropped:
        for _ in range(40):
            ledger = Ledger(probe_every=64, hysteresis=1.05)
            for _ in range(300):
                accepted = next((k for k in range(7) if rng.random() > 0.75), 7)
                ledger.drafted(1, 1 + accepted, 1.0, 3.6 / mean)  # 1 + 0.75 + 0.75^2 + ... = 3.6
                if not ledger.wants_draft(1):
                    dropped[mean] += 1
                    break
    assert dropped[1.1] <= 10 and dropped[0.9] >= 36


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert bucket(10**9) == BUCKETS - 1


def test_a_checkpoint_keeps_lambda_and_fall_back_and_notes_another_table() -> None:
    costs = table(B, lambda n: 0.5 + 0.5 * n)
    one, other = policy(costs, hazard=0.9), policy(costs)
    played(one, 100, lambda i: 1)
    other.load_state_dict(one.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in one.state_dict().values())  # safe loading, safetensors
    assert torch.equal(one.ledger.state(), other.ledger.state())
    drafted, again = (played(each, 300, lambda i: 1 + (i > 50) * 6) for each in (one, other))
    assert drafted == again > 4
    assert torch.equal(one.ledger.state(), other.ledger.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.use(costs)
    with pytest.warns(UserWarning, match="another cost table"):
        other.use(table(B, lambda n: 0.5 + 0.6 * n))
    assert other.drafts(4) and other.ledger.gain(4) is None


def test_decisions_do_not_depend_on_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run on a busy and on an idle machine: the same lengths, the same plain steps, the same books."""
    target = tiny.target()
    drafter = tiny.drafter(target, B, noise=0.05)
    table(B, lambda n: 0.5 + 0.3 * n).save(tmp_path / "t.json")
    logs = []
    for slow in (False, True):
        if slow:
            rng, clock = random.Random(0), time.perf_counter
            monkeypatch.setattr(time, "perf_counter", lambda rng=rng, clock=clock: clock() * 50 + rng.random())
        made = policy(table(B, lambda n: 0.5 + 0.3 * n), hazard=0.9, table=str(tmp_path / "t.json"), probe_every=5)
        with pytest.warns(UserWarning, match="stale"):  # made up on another machine
            engine = Engine(target, drafter, made, lanes=3)
        done = engine.generate([Request(p.tokens, 40) for p in tiny.prompts(5)])
        logs.append(
            ([d.blocks.lengths.tolist() for d in done], [d.plain_steps for d in done], made.ledger.state().tolist())
        )
    assert logs[0] == logs[1]
    assert sum(logs[0][1]) > 0 and sum(map(len, logs[0][0])) > 0  # some rounds were drafted, some were not


def test_the_table_is_found_by_machine_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path))
    target = tiny.target()
    drafter = tiny.drafter(target, B)
    mine = fingerprint(target, drafter)
    with pytest.raises(UserError, match="adaflash cost"):
        Engine(target, drafter, CostAware())
    made = table(B, lambda n: n)
    CostTable(made.contexts, made.loads, made.widths, made.verify, made.draft, mine).save(place(mine))
    got, stale = find(target, drafter)
    assert got.verify == made.verify and got.fingerprint == mine and not stale
    assert place(mine) != place(fingerprint(target, tiny.drafter(target, 4)))
    old = {**mine, "versions": {"torch": "1.0", "transformers": "1.0"}}
    CostTable(made.contexts, made.loads, made.widths, made.verify, made.draft, old).save(place(mine))
    assert "versions" in find(target, drafter)[1]
    with pytest.raises(UserError, match="blocks of 8"):
        find(target, tiny.drafter(target, 4), str(place(mine)))
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(UserError, match="adaflash cost"):
            find(target, drafter, str(tmp_path / name))


def test_interpolation_is_monotone_and_exact_on_the_grid() -> None:
    made = table(B, SHAPES["concave"], draft=lambda load: 0.1 * load)
    assert made.seconds(12, 4, 100) == pytest.approx(12**0.5)
    curve = made.curve(5, 100)
    assert len(curve) == 5 * (B - 1) + 1 and (curve.diff() >= 0).all()
    assert made.seconds(200, 16, 2000) > made.seconds(100, 16, 2000) > made.seconds(64, 8, 2000)
    assert made.draft_seconds(16, 1) == pytest.approx(1.6)
    assert made.break_even(2, 4, 50) == pytest.approx((0.4 + 12**0.5) / 4**0.5)


def test_rising() -> None:
    assert rising([1.0, 3.0, 2.0, 2.5, 4.0]) == [1.0, 2.5, 2.5, 2.5, 4.0]
    assert rising([3.0, 1.0]) == [2.0, 2.0]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UserError, match="probe_every"):
        CostAware(probe_every=1)


def test_it_trains_plays_its_own_rollouts_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a table a run ends at its first rollout, and says what to do; with one, 2 + 4 steps are 6 steps."""
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path))

    def new() -> AdaFlashModule:
        return fitting.module(
            tiny.target(), length=CostAware(probe_every=4), rollout=LiveRollout(12, lanes=4, warm_updates=0)
        )

    def fit(module: AdaFlashModule, steps: int, path: Path | None = None) -> L.Trainer:
        data = fitting.data(tmp_path, tiny.prompts(12))
        trainer = fitting.trainer(tmp_path, steps)
        trainer.fit(module, datamodule=data, ckpt_path=path)
        return trainer

    with pytest.raises(UserError, match="adaflash cost"):
        fit(new(), 1)
    whole, first, second = new(), new(), new()
    mine = fingerprint(whole.target, whole.drafter)
    replace(table(8, lambda n: 0.5 + 0.5 * n), fingerprint=mine).save(place(mine))
    fit(whole, 6)
    fit(first, 2).save_checkpoint(tmp_path / "two.ckpt")
    fit(second, 6, tmp_path / "two.ckpt")
    assert whole.length.ledger.rounds.sum() > 0
    for name, tensor in fitting.weights(whole).items():
        assert torch.equal(tensor, fitting.weights(second)[name]), name
