"""The numbers of DESIGN section 8, against traces counted by hand."""

from __future__ import annotations

import math
from statistics import pstdev

import pytest
import torch

from adaflash.decoding.stats import AcceptanceStats
from adaflash.types import BlockLog, Trajectory

PROMPT = 3
WRONG, UNKNOWN = 999, -1


def trajectory(
    rounds: list[tuple[int, int]],
    *,
    candidates: int,
    domain: str = "math",
    plain: int = 0,
    tail: int = 0,
    finish: str = "length",
    full_agreement: list[int] | None = None,
) -> Trajectory:
    """A consistent trace of rounds (L, A), then plain steps; `tail` < 0 cuts the last round short by that many tokens.

    `full_agreement[i]` says how many of all K candidates of round i agree with the text (A where not given).
    """
    length = PROMPT + 1 + sum(a + 1 for _, a in rounds) + plain + tail
    tokens = torch.arange(100, 100 + length)
    anchors, drafted, committed, place = [], [], [], PROMPT
    for i, (_, accepted) in enumerate(rounds):
        agree = full_agreement[i] if full_agreement else accepted
        text = [int(tokens[place + k]) if place + k < length else UNKNOWN for k in range(1, candidates + 1)]
        anchors.append(place)
        drafted.append([token if k < agree else WRONG for k, token in enumerate(text)])
        committed.append(min(accepted + 1, length - 1 - place))
        place += accepted + 1
    log = BlockLog(
        torch.tensor(anchors, dtype=torch.int64),
        torch.tensor(drafted, dtype=torch.int64).reshape(-1, candidates),
        torch.tensor([sent for sent, _ in rounds], dtype=torch.int64),
        torch.tensor([accepted for _, accepted in rounds], dtype=torch.int64),
        torch.tensor(committed, dtype=torch.int64),
    )
    return Trajectory("r", domain, tokens, PROMPT, finish, log, plain)


def scalars(*trajectories: Trajectory, block_size: int = 8, domains: tuple[str, ...] = ()) -> dict[str, float]:
    stats = AcceptanceStats(block_size, domains)
    stats.update(trajectories)
    return stats.scalars("val")


def test_hand_made_trace() -> None:
    """Accepted 0, 3, 7 of 7: the figures of FAULTS 84, with the bonus token in tau and without it in acceptance."""
    log = scalars(trajectory([(7, 0), (7, 3), (7, 7)], candidates=7, tail=8))
    assert log["val/tau"] == pytest.approx(13 / 3)
    assert log["val/acceptance"] == pytest.approx(10 / 21)
    assert log["val/utilisation"] == pytest.approx(13 / 24)
    assert log["val/verified_per_committed"] == pytest.approx(24 / 13)
    assert log["val/tokens_per_pass"] == log["val/tau"]  # no plain steps
    table = [log[f"val/acceptance/{k}"] for k in range(1, 8)]
    assert table == pytest.approx([2 / 3, 1, 1, 1 / 2, 1, 1, 1])
    assert [log[f"val/survival/{k}"] for k in range(1, 8)] == pytest.approx([2 / 3] * 3 + [1 / 3] * 4)
    assert log["val/length/mean"] == 7


def test_plain_steps_are_passes_that_commit_one_token() -> None:
    log = scalars(trajectory([(7, 3)], candidates=7, plain=2, tail=8))
    assert log["val/tau"] == 4  # plain steps do not touch tau
    assert log["val/tokens_per_pass"] == pytest.approx((4 + 2) / 3)
    assert log["val/utilisation"] == pytest.approx((4 + 2) / (8 + 2))
    assert log["val/plain_share"] == pytest.approx(2 / 3)


def test_only_plain_steps() -> None:
    """Rates without a denominator are left out; tau, by which checkpoints are chosen, is an honest NaN."""
    log = scalars(trajectory([], candidates=7, plain=5))
    assert math.isnan(log.pop("val/tau"))
    assert log == {
        "val/tokens_per_pass": 1,
        "val/utilisation": 1,
        "val/verified_per_committed": 1,
        "val/plain_share": 1,
    }


def test_adaptive_lengths_are_kaplan_meier() -> None:
    """A round that sent 2 candidates says nothing about the third, whatever happened to the first two."""
    log = scalars(trajectory([(2, 2), (3, 1), (3, 3), (1, 0)], candidates=3, tail=4), block_size=4)
    assert [log[f"val/acceptance/{k}"] for k in (1, 2, 3)] == pytest.approx([3 / 4, 2 / 3, 1])
    assert [log[f"val/survival/{k}"] for k in (1, 2, 3)] == pytest.approx([3 / 4, 1 / 2, 1 / 2])
    assert log["val/acceptance"] == pytest.approx(6 / 9)
    assert log["val/length/mean"] == pytest.approx(9 / 4)


def test_positions_nobody_sent_are_left_out() -> None:
    log = scalars(trajectory([(1, 1), (1, 1)], candidates=3, tail=4), block_size=4)
    assert "val/acceptance/2" not in log and "val/survival/2" not in log
    assert scalars(trajectory([(1, 0)], candidates=3, tail=4), block_size=4)["val/survival/3"] == 0  # none got that far


def test_a_stop_censors_what_is_behind_it() -> None:
    """The stop token is the second of 7 candidates; the five behind it were paid for, but were not rejected."""
    cut = trajectory([(7, 7)], candidates=7, tail=-6, finish="stop")
    log = scalars(cut)
    assert log["val/tau"] == 2  # two tokens kept, no bonus
    assert log["val/acceptance"] == pytest.approx(2 / 7)
    assert log["val/utilisation"] == pytest.approx(2 / 8)
    assert (log["val/acceptance/1"], log["val/acceptance/2"]) == (1, 1)
    assert "val/acceptance/3" not in log
    assert log["val/length/lost"] == 0
    assert log["val/length/wasted"] == log["val/length/regret"] == 5


def test_lost_wasted_and_regret() -> None:
    """Oracle lengths 5, 1, 0 against played 3, 4, 2: lost 2, 0, 0; wasted 0, 3, 2."""
    rounds, full = [(3, 3), (4, 1), (2, 0)], [5, 1, 0]
    log = scalars(trajectory(rounds, candidates=7, tail=8, full_agreement=full))
    assert log["val/length/lost"] == pytest.approx(2 / 3)
    assert log["val/length/wasted"] == pytest.approx(5 / 3)
    assert log["val/length/regret"] == pytest.approx(7 / 3)


def test_rounds_without_an_oracle_are_left_out_by_position_or_missing_rows() -> None:
    """A length limit inside the block, or a vocabulary row that was not computed, leaves no label."""
    limit = trajectory([(3, 3), (2, 1)], candidates=7, tail=1, full_agreement=[5, 1])
    assert int(limit.tokens[-1]) == 100 + PROMPT + 7  # the first block ends with the response, the second is cut off
    log = scalars(limit)
    assert log["val/length/lost"] == 2 and log["val/length/regret"] == 2
    hidden = trajectory([(3, 3)], candidates=7, tail=8)
    hidden.blocks.candidates[:, 3:] = UNKNOWN
    assert "val/length/lost" not in scalars(hidden)


def test_domains_and_spreads() -> None:
    math_, chat = (
        trajectory([(3, 3)] * 60, candidates=3, tail=4),
        trajectory([(3, 1)] * 60, candidates=3, domain="chat", tail=4),
    )
    log = scalars(math_, chat, block_size=4, domains=("math", "chat"))
    assert (log["val/tau/math"], log["val/tau/chat"], log["val/tau"]) == (4, 2, 3)
    assert log["val/domain_spread"] == 1 and log["val/domain_range"] == 2
    assert log["val/domain_spread/acceptance"] == pytest.approx(1 / 3)
    assert log["val/position_spread"] == pytest.approx(pstdev([1, 0.5, 1]))
    few = scalars(trajectory([(3, 3)] * 49, candidates=3, tail=4), block_size=4)
    assert "val/position_spread" not in few and "val/domain_spread" not in few


def test_sums_not_mean_of_means() -> None:
    """90 of 100 and 1 of 10: 0.827 by sums, where the mean of the two rates would be 0.5."""
    big, small = (
        trajectory([(1, 1)] * 90 + [(1, 0)] * 10, candidates=1),
        trajectory([(1, 1)] + [(1, 0)] * 9, candidates=1),
    )
    stats = AcceptanceStats(2)
    stats.update([big])
    stats.update([small])
    assert stats.scalars("val")["val/acceptance"] == pytest.approx(91 / 110)


def test_two_ranks_equal_one() -> None:
    domains = ("chat", "code", "math")
    data = [trajectory([(3, 2), (2, 0)], candidates=3, tail=4, domain=d, plain=i) for i, d in enumerate(domains)]
    whole, ranks = AcceptanceStats(4, domains), [AcceptanceStats(4, domains) for _ in range(2)]
    whole.update(data)
    ranks[0].update(data[:1])
    ranks[1].update(data[1:])
    assert {rank.counts.shape for rank in ranks} == {whole.counts.shape}  # same collective, whatever was seen
    ranks[0].counts += ranks[1].counts
    ranks[0]._computed = None
    assert ranks[0].scalars("val") == whole.scalars("val")


def test_errors_are_counted_and_nothing_else_of_them() -> None:
    failed = Trajectory("r", "math", torch.arange(3), 3, "error", BlockLog.empty(7), error="too long")
    stats = AcceptanceStats(8)
    stats.update([failed])
    total = stats.report().total
    assert (total.requests, total.errors, total.rounds) == (1, 1, 0)


def test_refusals_name_what_is_wrong() -> None:
    stats = AcceptanceStats(8, ("math",))
    with pytest.raises(ValueError, match="'poetry'; known domains: math"):
        stats.update([trajectory([(7, 1)], candidates=7, domain="poetry")])
    with pytest.raises(ValueError, match="block_size 4, but these numbers are for block_size 8"):
        stats.update([trajectory([(3, 1)], candidates=3)])
    bad = trajectory([(2, 1)], candidates=7)
    bad.blocks.accepted[0] = 3
    with pytest.raises(ValueError, match="accepted <= length"):
        stats.update([bad])
    with pytest.raises(ValueError, match="'all'"):
        AcceptanceStats(8, ("all",))


def test_reset_and_reuse() -> None:
    stats = AcceptanceStats(8)
    stats.update([trajectory([(7, 3)], candidates=7)])
    stats.reset()
    stats.update([trajectory([(7, 1)], candidates=7)])
    assert stats.scalars("train")["train/tau"] == 2


def test_plain_trajectories_of_an_engine_without_a_drafter_count_too() -> None:
    """Their log has K = 0; without a drafted round that contradicts nothing."""
    plain = Trajectory("r", "math", torch.arange(9), 3, "length", BlockLog.empty(0), plain_steps=5)
    assert scalars(plain)["val/tokens_per_pass"] == 1
