"""A number that is none on one rank: all ranks leave the update out together, or stop together with a message."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import rank_fits
import torch
from ranks import outcomes, run_ranks

from adaflash.callbacks.nan_guard import NaNGuard
from adaflash.length.survival import SurvivalLength
from adaflash.rollouts.recorded import RecordedRollout

PROMPTS = rank_fits.recorded(8)


class Spoilt(RecordedRollout):
    """The second rollout of the last rank has an infinite context state, or a teacher that is no number."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.made = what, 0

    def collect(self, prompts: Any, players: Any) -> Any:
        found = super().collect(prompts, players)
        self.made += 1
        if self.made == 2 and rank_fits.rank() == rank_fits.world() - 1 and self.what:
            states = getattr(found[-1], self.what).clone()
            states[0] = math.inf if self.what == "context" else math.nan
            found[-1] = dataclasses.replace(found[-1], **{self.what: states})
        return found


def train(what: str, folder: Path, guarded: bool = True, strategy: str = "ddp") -> tuple[Any, Any, Any]:
    """Four updates of one batch each; weights, the moments of Adam, and what was logged."""
    made = rank_fits.module(rollout=Spoilt(what), length=SurvivalLength(), log_gradient_norms_every=2)
    log = rank_fits.Log()
    guard = [NaNGuard()] if guarded else []
    trainer = rank_fits.fit(made, folder, rank_fits.share(PROMPTS, 4), 4, log, *guard, strategy=strategy)
    (optimizer,) = trainer.optimizers
    moments = {str(i): state["exp_avg_sq"] for i, state in enumerate(optimizer.state.values())}
    return made.state_dict(), moments, log.updates


def test_one_rank_with_a_number_that_is_none_is_skipped_by_all(tmp_path: Path) -> None:
    for what, kind in (("context", "student logits"), ("teacher", "teacher logits")):
        ended = outcomes(train, what, tmp_path / what)
        assert all(each.exitcode == 0 for each in ended), "\n".join(map(str, ended))
        (weights, moments, log), (others, *_) = (each.value for each in ended)
        rank_fits.assert_equal(weights, others, 0)
        assert all(bool(value.isfinite().all()) for value in [*weights.values(), *moments.values()])
        assert log[-1]["train/skipped_updates"] == 1
        assert f"[rank: 1] update 2: {kind}: prompt 'p" in ended[1].output and "has NaN" in ended[1].output
        assert "teaches nothing" not in ended[0].output


def test_alone_it_is_skipped_too_and_the_other_updates_count(tmp_path: Path) -> None:
    clean, *_ = train("", tmp_path / "clean", strategy="auto")
    spoilt, _, log = train("teacher", tmp_path / "spoilt", strategy="auto")
    assert any(not torch.equal(clean[name], value) for name, value in spoilt.items())
    assert log[-1]["train/skipped_updates"] == 1 and log[-1]["loss/ce"] > 0


def test_without_the_guard_all_ranks_stop_and_say_why(tmp_path: Path) -> None:
    ended = outcomes(train, "teacher", tmp_path, False)
    assert not any(each.hung for each in ended), "\n".join(map(str, ended))
    for each in ended:
        assert "update 2: the gradient of the drafter is not finite" in each.error, str(each)


def test_ranks_that_are_well_give_what_one_process_gives(tmp_path: Path) -> None:
    """In every number that is logged, norms of terms among them."""
    alone, _, log = train("", tmp_path / "alone", strategy="auto")
    assert log[0]["grad_norm/loss/ce"] > 0 and log[-1]["grad_norm/loss/ce"] != log[0]["grad_norm/loss/ce"]
    for weights, _, their_log in run_ranks(train, "", tmp_path / "two"):
        rank_fits.assert_equal(alone, weights)
        rank_fits.assert_same_log(log, their_log)
