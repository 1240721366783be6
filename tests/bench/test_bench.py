"""`adaflash bench`: splits, windows, verdicts, what can be played, and the file that a stopped benchmark goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import pytest
import tiny
import torch

from adaflash.bench import bench_command, stream
from adaflash.bench.booked import Booked, plain_seconds
from adaflash.bench.cells import Scale, Stage, band_of, verdict
from adaflash.bench.contenders import contenders
from adaflash.bench.cost import measure
from adaflash.bench.machine import Watch
from adaflash.bench.prompt_sets import PromptSet, split
from adaflash.bench.rows import Rows
from adaflash.bench.stream import News, busy_window, play
from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.cost_aware import CostAware
from adaflash.length.cost_table import CostTable
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.length.survival import SurvivalLength
from adaflash.module import AdaFlashModule
from adaflash.types import Prompt, Request


@pytest.fixture(scope="module")
def module() -> AdaFlashModule:
    return fitting.module(tiny.target(), length=SurvivalLength()).eval()


@pytest.fixture(scope="module")
def costs(module: AdaFlashModule) -> CostTable:
    return measure(module.target, module.drafter, module.length, (1, 2), (8,), 1)


@pytest.fixture(scope="module")
def stage(module: AdaFlashModule, costs: CostTable) -> Stage:
    prompts = split("tiny", tiny.prompts(24))
    return Stage(module, costs, prompts, 2, Scale(max_new_tokens=5, num_prompts=6))


def test_no_prompt_is_reported_and_tuned_on_and_none_is_there_twice() -> None:
    prompts = tiny.prompts(24)
    made = split("tiny", [*prompts, *prompts[:5]])
    report, tune = ({each.tokens for each in half} for half in (made.report, made.tune))
    assert not report & tune and len(report) + len(tune) == len({p.tokens for p in prompts})
    assert len(made.tune) == sum(max(1, n // 5) for n in (8, 8, 8))
    assert [each.domain for each in made.report[:6]] == ["a", "b", "c"] * 2  # in turn
    assert split("other name", prompts).digest == made.digest != split("fewer", prompts[1:]).digest


def test_a_set_of_one_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="1 different prompts, 1 domains; at least 2 of one domain"):
        split("one", tiny.prompts(1) * 3)


def test_groups_are_full_and_never_repeat() -> None:
    prompts = tiny.prompts(10)
    sizes = [[len(group.requests) for group in Scale(4, 6).groups(prompts, load)] for load in (1, 2, 4, 8)]
    assert sizes == [[1] * 6, [2] * 3, [4, 4], [8]]
    ids = [request.id for group in Scale(4, 6).groups(prompts, 4) for request in group.requests]
    assert len(set(ids)) == len(ids)


def test_the_window_is_open_while_every_lane_is_busy() -> None:
    """Two lanes, three requests: open when the second has its first token, closed by the first end with none waiting."""
    news = [
        News(0.1, 0, 0, 1, False), News(0.2, 0, 1, 1, False),
        News(1.0, 1, 0, 3, False), News(1.0, 1, 1, 2, True), News(1.5, 1, 2, 1, False),
        News(2.0, 2, 0, 2, False), News(2.0, 2, 2, 2, False),
        News(3.0, 3, 0, 1, True), News(3.1, 3, 2, 4, False),
        News(4.0, 4, 2, 1, True),
    ]  # fmt: skip
    tokens, seconds = busy_window(news, 2, 3)
    assert tokens == 3 + 2 + 1 + 2 + 2 + 1 + 4 and seconds == pytest.approx(3.1 - 0.2)
    assert busy_window(news[:2], 2, 3) == (0, 0.0)


def test_a_watched_run_is_the_same_run(module: AdaFlashModule) -> None:
    """Same texts as `generate`, one time to the first and last token for each request, in order."""
    requests = [Request(p.tokens, 3 + i, p.id) for i, p in enumerate(tiny.prompts(5))]
    engine = Engine(module.target, module.drafter, FullBlock(), lanes=2)
    run, told = play(engine, requests), engine.generate(requests)
    assert [t.tokens.tolist() for t in run.trajectories] == [t.tokens.tolist() for t in told]
    assert len(run.first) == len(run.latency) == 5
    assert all(0 < first <= last <= run.wall for first, last in zip(run.first, run.latency, strict=True))
    assert 0 < run.window[0] <= run.tokens and 0 < run.window[1] < run.wall
    assert sum(run.parts.values()) > 0.5 * run.wall


def test_booked_seconds_are_counts_times_table(module: AdaFlashModule, costs: CostTable) -> None:
    """By hand, one request: every drafted round costs D(1) and T(1 + L); plain steps cost T(1)."""
    request = Request(tiny.prompts(1)[0].tokens, 10)
    booked = Booked(FixedLength(2), costs)
    [text] = Engine(module.target, module.drafter, booked, lanes=1).generate([request])
    log, wanted = text.blocks, 0.0
    for anchor, length in zip(log.anchors.tolist(), log.lengths.tolist(), strict=True):
        wanted += costs.draft_seconds(1, anchor) + costs.seconds(1 + length, 1, anchor)
    wanted += text.plain_steps * costs.seconds(1, 1, len(text.tokens) - 2)
    assert booked.seconds == pytest.approx(wanted)
    [plain] = Engine(module.target, lanes=1).generate([request])
    by_hand = sum(costs.seconds(1, 1, plain.prompt_length + step) for step in range(1, len(plain.response)))
    assert plain_seconds(costs, [plain]) == pytest.approx(by_hand)


def test_a_cell_counts_what_its_policy_did(stage: Stage, module: AdaFlashModule) -> None:
    """All policies of a checkpoint with a survival head give plain decoding's text, and rows of plain values."""
    playable, missing = contenders(module, [])
    assert [each.name for each in playable] == ["plain", "full", "fixed", "paper", "cost", "cost_or_plain", "own"]
    assert not missing
    rows = {each.name: stage.measure(each, (1, 3)) for each in playable}
    json.dumps(rows, allow_nan=False)
    for row in rows.values():
        assert (row["prompts"], row["identical"], row["groups"], row["load"]) == (6, 6, 3, 2)
        assert row["interval"] and row["latency"]["plain"]["first"] <= row["latency"]["plain"]["p95"]
        assert row["machine"]["threads"] == torch.get_num_threads()
    assert rows["plain"]["numbers"]["tokens_per_pass"] == 1 and rows["plain"]["modelled_ratio"] is None
    assert rows["full"]["described"] == "FullBlock" and set(rows["full"]["domains"]) == {"a", "b", "c"}
    best = rows["fixed"]["tuned"]
    assert set(best["modelled_seconds"]) == {1, 3}
    assert best["best"] == min(best["modelled_seconds"], key=best["modelled_seconds"].get)
    assert rows["fixed"]["described"] == f"FixedLength({best['best']})"
    assert rows["full"]["numbers"]["length/mean"] > rows["fixed"]["numbers"]["length/mean"]


def test_a_text_that_differs_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrupting one drafted token is seen: `identical` cannot be hard-wired."""
    [full] = [each for each in contenders(stage.module, ["full"])[0] if each.name == "full"]
    real = stream.play

    def corrupt(engine: Engine, requests: Any) -> Any:
        run = real(engine, requests)
        if engine.drafter is not None:
            run.trajectories[0].tokens[-1] += 1
        return run

    monkeypatch.setattr("adaflash.bench.cells.play", corrupt)
    row = stage.measure(full)
    assert row["identical"] == 6 - 3 and len(row["differing"]) == 3  # the first of each of three groups


def test_what_a_checkpoint_cannot_play_is_said_or_refused() -> None:
    fixed = fitting.module(tiny.target(), length=FixedLength(2))
    playable, missing = contenders(fixed, [])
    assert [each.name for each in playable] == ["plain", "full", "fixed"]
    assert "no length head" in missing["paper"] and "no survival head" in missing["cost"]
    with pytest.raises(UserError, match="--policies cost: the checkpoint has no survival head"):
        contenders(fixed, ["cost"])
    with pytest.raises(UserError, match="there is no 'ful'"):
        contenders(fixed, ["ful"])


def test_the_papers_head_and_survival_are_those_of_the_checkpoint(module: AdaFlashModule) -> None:
    made = {each.name: each.make(0) for each in contenders(module, [])[0] if each.make}
    for name in ("paper", "cost"):
        for key, value in module.length.head.state_dict().items():  # type: ignore[union-attr]
            assert torch.equal(made[name].head.state_dict()[key], value)  # type: ignore[union-attr]
    cost = made["cost_or_plain"]
    assert isinstance(cost, CostAware) and cost.fall_back and not made["cost"].fall_back  # type: ignore[union-attr]
    assert torch.equal(cost.hazard.out.weight, module.length.hazard.out.weight)  # type: ignore[union-attr]
    assert cost.ledger.gain(2) is None  # its books are empty


@pytest.mark.parametrize(
    ("ratio", "interval", "band", "said"),
    [
        (0.9, (0.8, 1.1), 0.0, "no gain"),
        (1.2, (1.1, 1.3), 0.05, "gain"),
        (1.2, (0.99, 1.3), 0.05, "unclear"),
        (1.2, (1.1, 1.3), 0.25, "unclear"),
        (1.2, None, 0.0, "unclear"),
        (None, None, 0.0, "not measured"),
    ],
)
def test_a_gain_excludes_1_and_exceeds_the_band(ratio: float | None, interval: Any, band: float, said: str) -> None:
    assert verdict({"ratio": ratio, "interval": interval}, band) == said


def test_the_band_is_the_farthest_end() -> None:
    assert band_of({"ratio": 1.01, "interval": (0.94, 1.03)}) == pytest.approx(0.06)
    assert band_of({"ratio": 0.98, "interval": None}) == pytest.approx(0.02)


def test_a_row_that_a_kill_cut_short_is_measured_again(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "bench.jsonl")
    rows.append({"key": {"load": 1}, "n": 1})
    with rows.path.open("a") as file:
        file.write('{"format": 1, "key": {"load": 2')
    assert rows.done({"load": 2}) is None
    rows.append({"key": {"load": 3}, "n": 3})
    rows.append({"key": {"load": 1}, "n": 4})
    assert [row["n"] for row in rows.read()] == [1, 3, 4]
    newest = rows.done({"load": 1})
    assert newest and newest["n"] == 4


def test_the_watch_sees_this_process() -> None:
    watch = Watch()
    x = torch.randn(300, 300)
    for _ in range(100):
        x @ x
    seen = watch.seen()
    assert 0 < seen.cpu_share <= 1.5 and (seen.others is None or 0 <= seen.others <= 1.01)


def test_prompt_sets_know_their_order() -> None:
    made = PromptSet("x", (Prompt("1", "a", (1,)),), (Prompt("2", "a", (2,)),))
    assert made.digest != PromptSet("x", made.tune, made.report).digest


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="positive numbers"):
        bench_command.main(["--checkpoint", "x", "--loads", "0"])
    with pytest.raises(UserError, match="no such file"):
        bench_command.main(["--checkpoint", "x"])
