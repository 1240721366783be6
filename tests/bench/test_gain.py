"""Speed against plain decoding, on a clock that the test turns by hand."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from rich.console import Console

from adaflash.bench import runs
from adaflash.bench.gain import GainRow, measure_gain
from adaflash.bench.history import Entry
from adaflash.bench.interval import bootstrap
from adaflash.bench.table import Gain, render
from adaflash.decoding.tally import Tally
from adaflash.types import BlockLog, Prompt, Request, Trajectory


class Clock:
    """Seconds that pass only when somebody works; `drift` makes every later second longer."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift = 0.0, drift
        self.log: list[str] = []

    def work(self, seconds: float) -> float:
        seconds *= 1 + self.drift * len(self.log)
        self.now += seconds
        return seconds


class FakeEngine:
    """Emits prompt[0] + position; `cost` seconds a round of `accepted` + 1 tokens, half a second of prefill."""

    def __init__(self, clock: Clock, name: str, cost: float, accepted: int | None = None, wrong: str = "") -> None:
        self.clock, self.name, self.cost, self.accepted, self.wrong = clock, name, cost, accepted, wrong
        self.seconds: Counter[str] = Counter()

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        self.clock.log.append(self.name)
        self._spend("prefill", 0.5)
        return [self._decode(request) for request in requests]

    def _decode(self, request: Request) -> Trajectory:
        text = [request.prompt[0] + i for i in range(request.max_new_tokens)]
        if request.id == self.wrong and len(text) > 5:
            text[5] += 1000
        tokens = torch.tensor([*request.prompt, *text])
        step = (self.accepted or 0) + 1
        rounds = (len(text) - 1) // step
        self._spend("verify", self.cost * rounds)
        blocks, plain = BlockLog.empty(0), rounds
        if self.accepted is not None:
            anchors = len(request.prompt) + torch.arange(rounds) * step
            full = torch.full_like(anchors, self.accepted)
            blocks, plain = BlockLog(anchors, torch.zeros(rounds, 3, dtype=torch.int64), full + 1, full, full + 1), 0
        return Trajectory(request.id, request.domain, tokens, len(request.prompt), "length", blocks, plain)

    def _spend(self, part: str, seconds: float) -> None:
        self.seconds[part] += self.clock.work(seconds)  # type: ignore[assignment]


PROMPTS = {name: [Prompt(f"{name}{i}", name, (10 * i + 1, 2)) for i in range(4)] for name in ("math", "chat")}

Measure = Callable[..., list[GainRow]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    def run(clock: Clock, plain: FakeEngine, drafted: FakeEngine, **kwargs: int) -> list[GainRow]:
        monkeypatch.setattr(runs.time, "perf_counter", lambda: clock.now)
        return measure_gain(plain, drafted, PROMPTS, **({"max_new_tokens": 25} | kwargs))

    return run


def test_ratio_of_decode_only_speeds(measure: Measure) -> None:
    """24 tokens by steps of 0.1 s against 12 rounds of 0.15 s: 10 and 13.3 tokens/s, prefill apart."""
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.15, accepted=1))
    assert [row.domain for row in rows] == ["chat", "math", "all"]
    for row in rows:
        assert row.plain.decode == pytest.approx(10) and row.drafted.decode == pytest.approx(40 / 3)
        assert row.ratio == pytest.approx(4 / 3)
        assert row.interval == pytest.approx((4 / 3, 4 / 3))
        assert row.end_to_end_ratio == pytest.approx((0.5 + 2.4) / (0.5 + 1.8))
        assert (row.tau, row.verdict, row.noise) == (2, "gain", pytest.approx(0))
        assert row.accounted == pytest.approx(1)
    assert [row.prompts for row in rows] == [row.identical for row in rows] == [4, 4, 8]
    assert rows[-1].plain.prefill_seconds == pytest.approx(8 * 0.5)


def test_order_is_plain_drafted_drafted_plain_and_warm_up_is_left_out(measure: Measure) -> None:
    clock = Clock()
    measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.1, accepted=1), rounds=2, group_size=4)
    assert "".join(clock.log) == "AB" + "ABBA" * 2 * 2


def test_a_machine_that_slows_down_does_so_for_both(measure: Measure) -> None:
    """With linear drift the interleaving still gives the true ratio, and the drift shows as noise."""
    clock = Clock(drift=0.02)
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.15, accepted=1))
    assert rows[-1].ratio == pytest.approx(4 / 3, rel=1e-3)
    assert rows[-1].noise and rows[-1].noise > 0.03


def test_no_gain_says_what_it_would_take(measure: Measure) -> None:
    """A round costs 3 steps and gives 2 tokens: ratio 2/3, break-even at tau 3, inside a block of 4."""
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.3, accepted=1))
    assert rows[0].verdict == "no gain" and rows[0].break_even_tau == pytest.approx(3)
    text = shown(Gain(rows, "FixedLength(2)", 1, 25))
    assert "no gain at tau 2.00" in text and "breaks even at tau 3.00" in text
    assert "more than a block" not in text
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.5, accepted=1))
    assert "more than a block of 4 can give" in shown(Gain(rows, "FixedLength(2)", 1, 25))


def test_less_than_the_noise_is_unclear(measure: Measure) -> None:
    clock = Clock(drift=0.02)
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.198, accepted=1))
    assert 1 < (rows[-1].ratio or 0) < 1.02 and rows[-1].verdict == "unclear"


def test_every_difference_in_the_text_is_reported(measure: Measure) -> None:
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.1, accepted=1, wrong="math2"))
    by_domain = {row.domain: row for row in rows}
    assert by_domain["math"].differing == [{"id": "math2", "domain": "math", "position": 5, "runs": 2}]
    assert (by_domain["math"].identical, by_domain["chat"].identical, by_domain["all"].identical) == (3, 4, 7)
    text = shown(Gain(rows, "FullBlock", 1, 25))
    assert "3/4" in text and "7/8" in text
    assert text.count("NOT IDENTICAL: math2 (math) differs from plain decoding at response token 5") == 1


def test_the_table_and_the_file(measure: Measure) -> None:
    """Tau before and now by domain, what was active, and the same in JSON."""
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.15, accepted=1), group_size=2)
    before, now = (Entry(1, step, "val", {"math": Tally(rounds=100, committed=c)}) for step, c in ((0, 104), (50, 151)))
    gain = Gain(rows, "AdaptiveLength(1.3)", 2, 25, before, now)
    text = shown(gain)
    for part in (
        "1.04 -> 1.51 (+0.47)",
        "step 0 -> 50",
        "AdaptiveLength(1.3)",
        "mean L 2.00 (2:96)",
        "plain steps 0%",
        "4/4",
    ):
        assert part in text, part
    assert "no gain" not in text
    data = json.loads(json.dumps(gain.as_json()))
    math_ = next(row for row in data["domains"] if row["domain"] == "math")
    assert (math_["tau_before"], math_["tau_now"], math_["tau_measured"]) == (1.04, 1.51, 2)
    assert data["step_now"] == 50 and math_["verdict"] == "gain" and math_["counts"]["lengths"] == [0, 0, 96, 0]


def test_a_busy_machine_is_marked(measure: Measure) -> None:
    clock = Clock()
    rows = measure(clock, FakeEngine(clock, "A", 0.1), FakeEngine(clock, "B", 0.1, accepted=1))
    assert "load 7.0 on 2 cores" in shown(Gain(rows, "FullBlock", 1, 25, load=7, cores=2))
    assert "busy" not in shown(Gain(rows, "FullBlock", 1, 25, load=2, cores=2))


def test_bootstrap_is_repeatable_and_needs_clusters() -> None:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    data = [1.0, 1.2, 0.9, 1.1, 1.3, 0.8]
    low, high = bootstrap(data, mean) or (0, 0)
    assert bootstrap(data, mean) == (low, high) and 0.85 < low < 1.05 < high < 1.25
    assert bootstrap(data[:2], mean) is None


def shown(gain: Gain) -> str:
    out = io.StringIO()
    Console(width=400, file=out).print(render(gain))
    return out.getvalue()
