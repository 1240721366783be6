"""The module: what it trains and what it leaves alone, exact windows, batches with nothing to learn, refusals."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from pathlib import Path
from typing import Any

import fitting
import lightning as L
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from adaflash.errors import UserError
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import Outcome
from adaflash.length.fixed import FullBlock
from adaflash.length.hazard import at_risk
from adaflash.losses import (
    ExponentialDecay,
    SlotSampling,
    TeacherCrossEntropy,
    TokenCrossEntropy,
    TotalVariation,
    Uniform,
)
from adaflash.losses.oracle import plain_loss
from adaflash.module import AdaFlashModule
from adaflash.optim import AdamWConfig
from adaflash.plugin import LossPlugin
from adaflash.rollouts.base import RolloutSource
from adaflash.rollouts.live import LiveRollout
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.step import StepResult
from adaflash.types import Prompt, PromptBatch

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


class Watch(Callback):
    """Gradients and log of every optimizer step, after clipping."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []
        self.logged: list[dict[str, float]] = []
        self.modes: list[tuple[bool, bool]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == len(self.gradients):
            return  # the window is still open
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in pl_module.named_parameters()})
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.modes.append((pl_module.drafter.training, pl_module.target.model.training))


def batch(prompts: list[Prompt], rollout_id: int = 0, visit: int = 0, visits: int = 1, rows: int = 0) -> PromptBatch:
    return PromptBatch(tuple(prompts), rollout_id, visit, visits, rows or len(prompts), cursor=rollout_id + 1)


class Batches(L.LightningDataModule):
    """Hand-made batches, in order."""

    def __init__(self, *batches: PromptBatch) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def recorded(count: int, seed: int = 0, longest: int = 14) -> list[Prompt]:
    """Prompts with random responses of many lengths, some of which ended by a stop."""
    made = tiny.prompts(count, seed=seed)
    answers = tiny.prompts(count, longest, seed=seed + 100)
    return [
        dataclasses.replace(p, response=(1, 2, *a.tokens), finish=("stop", "length")[i % 2])
        for i, (p, a) in enumerate(zip(made, answers, strict=True))
    ]


def fit(
    module: AdaFlashModule, folder: Path, data: L.LightningDataModule, steps: int, *callbacks: Callback, **settings: Any
):
    trainer = fitting.trainer(folder, steps, callbacks, **settings)
    trainer.fit(module, datamodule=data)
    return trainer


# ---- what is trained ----


def test_only_drafter_and_head_are_trained_and_kept(target, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    module = fitting.module(target)
    trainable = {*module.drafter.parameters(), *module.length.parameters()}
    assert {*module.parameters()} == trainable
    trainer = fit(module, tmp_path, fitting.data(tmp_path, tiny.prompts(8)), 3)
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len({*held}) == len(trainable)
    assert {*held} == trainable
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert {name.split(".")[0] for name in module.state_dict()} == {"drafter", "length"}
    assert not target.model.training


def test_drafter_trains_again_after_validation_and_the_target_never_does(target, tmp_path: Path) -> None:
    watch = Watch()
    data = fitting.data(tmp_path, tiny.prompts(8), tiny.prompts(3, seed=5))
    fit(fitting.module(target), tmp_path, data, 4, watch, limit_val_batches=1.0, val_check_interval=2)
    assert watch.modes == [(True, False)] * 4
    assert not target.model.training


def test_every_trainable_parameter_has_a_gradient_each_step(target, tmp_path: Path) -> None:
    watch = Watch()
    fit(fitting.module(target), tmp_path, fitting.data(tmp_path, tiny.prompts(8)), 3, watch)
    assert len(watch.gradients) == 3
    for gradients in watch.gradients:
        missing = [name for name, g in gradients.items() if g is None or not g.abs().sum() > 0]
        # No weight is left out. (`res` and `down` of a fresh head, like all others, see a gradient at once.)
        assert missing == []


# ---- exact windows ----


def parts_of(prompts: list[Prompt], sizes: list[int]) -> list[PromptBatch]:
    groups, start = [], 0
    for number, size in enumerate(sizes):
        groups.append(batch(prompts[start : start + size], rollout_id=number))
        start += size
    return groups


def trained(folder: Path, batches: list[PromptBatch], accumulate: int, **settings: Any) -> dict[str, Tensor]:
    """Weights after two passes over the batches, all anchors. In fp64: the first steps of Adam are signs of gradients,
    and the sign of one that is 0 up to rounding is rounding."""
    module = fitting.module(tiny.target(dtype=torch.float64), rollout=RecordedRollout(), num_anchors=100, **settings)
    module.double()
    trainer = fitting.trainer(folder, -1, accumulate_grad_batches=accumulate, check_val_every_n_epoch=1, max_epochs=2)
    trainer.fit(module, datamodule=Batches(*batches))
    return fitting.weights(module)


@pytest.mark.parametrize(("sizes", "accumulate"), [([1, 2, 4, 1], 4), ([2, 2, 2, 2], 4), ([3, 5], 8)])
@pytest.mark.parametrize("clip", [1e9, 0.05])
def test_micro_batches_are_one_batch(tmp_path: Path, sizes: list[int], accumulate: int, clip: float) -> None:
    """Also where the last window of the epoch is shorter than `accumulate` ([3, 5] with 8)."""
    prompts = recorded(8)
    whole = trained(tmp_path, parts_of(prompts, [8]), 1, clip=clip)
    split = trained(tmp_path, parts_of(prompts, sizes), accumulate, clip=clip)
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_a_short_last_window_is_exact(tmp_path: Path) -> None:
    """Three batches, accumulate 2: the second update has one batch, and must be that batch's own."""
    prompts = recorded(8)
    short = trained(tmp_path, parts_of(prompts, [2, 2, 4]), 2)
    plain = trained(tmp_path, parts_of(prompts, [4, 4]), 1)
    for name, tensor in plain.items():
        torch.testing.assert_close(short[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_gradient_is_that_of_the_plain_mean(target, tmp_path: Path) -> None:
    """Against the oracle: sum of w l over all blocks and trajectories, divided once by the sum of w; MSE of the head."""
    prompts = recorded(5)
    watch = Watch()
    module = fitting.module(target, rollout=RecordedRollout(), num_anchors=100, clip=1e9)
    wanted = _oracle_gradients(module, prompts)
    data = Batches(*parts_of(prompts, [2, 3]))
    trainer = fitting.trainer(tmp_path, 1, [watch], accumulate_grad_batches=2)
    trainer.fit(module, datamodule=data)
    for name, gradient in wanted.items():
        got = watch.gradients[0][name]
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


def _oracle_gradients(module: AdaFlashModule, prompts: list[Prompt]) -> dict[str, Tensor]:
    trajectories = module.rollout.collect(prompts, module._players(batch(prompts)))
    lesson = module._lesson(trajectories, module._chance(batch(prompts)))
    blocks, hidden = lesson.blocks, module._draft(lesson)
    weight = ExponentialDecay()(blocks.supervised)
    teacher = torch.zeros(*blocks.supervised.shape, hidden.shape[-1])
    for n, (row, anchor) in enumerate(zip(blocks.rows.tolist(), blocks.anchors.tolist(), strict=True)):
        one = trajectories[row]
        for k in range(1, 8):
            if blocks.supervised[n, k - 1]:
                teacher[n, k - 1] = one.teacher[anchor + k - 1 - one.prompt_length]
    with torch.no_grad():
        agree = module.target.head(hidden[:, 1:]).argmax(-1) == blocks.labels
        accepted = (agree & blocks.supervised).long().cumprod(1).sum(1)
    error = module.length.head(hidden.detach()) - (accepted + 1) / 8
    (error.square()[blocks.full].mean()).backward()
    terms = [*module.losses]
    loss = plain_loss(hidden, blocks.labels, weight, teacher, terms, module.target.head) / weight.sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return gradients


def test_drafter_and_head_are_clipped_apart(target, tmp_path: Path) -> None:
    watch = Watch()
    fit(fitting.module(target, clip=0.01), tmp_path, fitting.data(tmp_path, tiny.prompts(8)), 2, watch)
    for gradients, logged in zip(watch.gradients, watch.logged, strict=True):
        for part in ("drafter", "length"):
            norm = torch.stack([g.norm() for name, g in gradients.items() if name.startswith(part)]).norm()
            before = logged[f"grad_norm/{part}"]
            assert before > 0.01
            assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_head_gradient_never_reaches_the_drafter(target, tmp_path: Path) -> None:
    watch, plain = Watch(), Watch()
    prompts = recorded(4)
    for policy, callback in ((AdaptiveLength(), watch), (FullBlock(), plain)):
        module = fitting.module(target, rollout=RecordedRollout(), length=policy, clip=1e9)
        fit(module, tmp_path, Batches(batch(prompts)), 1, callback)
    for name, gradient in plain.gradients[0].items():
        assert torch.equal(gradient, watch.gradients[0][name]), name


# ---- nothing to learn ----


class Empty(RolloutSource):
    """Responses of one token each: no anchor."""

    def collect(self, prompts, players):
        short = [dataclasses.replace(p, response=p.response[:1]) for p in prompts]
        return RecordedRollout().collect(short, players)


def test_a_batch_with_nothing_to_learn_moves_nothing(target, tmp_path: Path) -> None:
    watch = Watch()
    module = fitting.module(target, rollout=Empty())
    before = fitting.weights(module)
    fit(module, tmp_path, Batches(batch(recorded(2))), 1, watch)
    assert all(g is not None and not g.any() for g in watch.gradients[0].values())  # same collectives, zero gradient
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_an_empty_batch_sums_the_same_names_as_any_other(target) -> None:
    """They are reduced over ranks as one flat tensor: another name on one rank would be a hang or a wrong sum."""
    names = []
    for rollout in (Empty(), RecordedRollout()):
        module = fitting.module(target, rollout=rollout)
        module._trainer = fitting.trainer(Path(), 1)  # type: ignore[assignment]
        module.training_step(batch(recorded(2)), 0)
        names.append({name: value.shape for name, value in module.window.close().items()})
    assert names[0] == names[1]


def test_an_empty_micro_batch_does_not_dilute_its_window(target, tmp_path: Path) -> None:
    class Sometimes(RolloutSource):
        def collect(self, prompts, players):
            return (Empty() if prompts[0].id == "p0" else RecordedRollout()).collect(prompts, players)

    prompts = recorded(4)
    results = []
    for batches, accumulate in ((parts_of(prompts, [1, 3]), 2), ([batch(prompts[1:], 1)], 1)):
        watch = Watch()
        module = fitting.module(target, rollout=Sometimes(), num_anchors=100)
        fit(module, tmp_path, Batches(*batches), 1, watch, accumulate_grad_batches=accumulate)
        results.append(watch.gradients[0])
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def test_failed_requests_are_left_out(target, tmp_path: Path) -> None:
    """A prompt that the engine refuses (longer than the context) is no reason to stop."""
    long = Prompt("long", "a", tuple([5] * 300))
    module = fitting.module(target)
    watch = Watch()
    fit(module, tmp_path, Batches(batch([long, *tiny.prompts(2)])), 1, watch)
    assert watch.logged[0]["loss/ce"] > 0


# ---- the log ----


def test_terms_are_logged_by_name_as_window_means(target, tmp_path: Path) -> None:
    prompts = recorded(6)
    logs = []
    for sizes, accumulate in (([6], 1), ([1, 5], 2)):
        watch = Watch()
        module = fitting.module(target, rollout=RecordedRollout(), num_anchors=100)
        fit(module, tmp_path, Batches(*parts_of(prompts, sizes)), 1, watch, accumulate_grad_batches=accumulate)
        logs.append(watch.logged[-1])
    whole, split = logs
    trajectories = module.rollout.collect(prompts, module._players(batch(prompts)))
    module = fitting.module(target, num_anchors=100)
    lesson = module._lesson(trajectories, module._chance(batch(prompts)))
    result = module._terms(module._draft(lesson), lesson)
    for term in ("ce", "rkl"):
        assert whole[f"loss/{term}"] == pytest.approx(float(result.terms[term] / result.weight), rel=1e-4)
    assert {"loss/ce", "loss/rkl", "share/rkl/removed", "share/rkl/cut", "train/agreement"} <= set(whole)
    for name, value in whole.items():
        assert split[name] == pytest.approx(value, rel=1e-4), name
    # an untrained drafter of 97 tokens: the teacher's choice costs more than a guess at random would
    assert whole["loss/ce"] > 3
    assert 0 <= whole["train/agreement"] < 0.2


def test_a_plugin_term_is_trained_and_logged(target, tmp_path: Path) -> None:
    gradients = []
    for plugins in ([], [LossPlugin(TokenCrossEntropy(0.5, "token"))]):
        watch = Watch()
        module = fitting.module(target, rollout=RecordedRollout(), clip=1e9)
        fit(module, tmp_path, Batches(batch(recorded(3))), 1, watch, *plugins)
        gradients.append(watch.gradients[0]["drafter.fc.weight"])
    assert watch.logged[0]["loss/token"] > 3
    assert not torch.allclose(*gradients)


# ---- settings of the objective ----


def outcome_of(module: AdaFlashModule, prompts: list[Prompt]) -> tuple[StepResult, Outcome]:
    """One step of a module on recorded responses, a third of whose tokens are what the drafter says itself."""
    trajectories = RecordedRollout().collect(prompts, module._players(batch(prompts)))
    lesson = module._lesson(trajectories, module._chance(batch(prompts)))
    hidden = module._draft(lesson)
    with torch.no_grad():
        drafted = module.target.head(hidden[:, 1:]).argmax(-1)
    agree = torch.rand(drafted.shape, generator=torch.Generator().manual_seed(7)) < 0.7
    lesson.blocks.labels[agree] = drafted[agree]
    result = module._terms(hidden, lesson, module._chance(batch(prompts)))
    return result, module._outcome(hidden, lesson.blocks, result)


def test_sampled_slots_label_and_log_as_all_of_them_would(target) -> None:
    """Rows that were never computed count neither as wrong nor as right; acceptance needs none of them."""
    (_, whole), (result, sampled) = (
        outcome_of(fitting.module(target, sampling=sampling, num_anchors=50), recorded(6))
        for sampling in (None, SlotSampling())
    )
    assert bool(((result.candidates < 0) & whole.known).any())
    assert torch.equal(sampled.accepted, whole.accepted) and 0.3 < float(whole.accepted.mean()) < 6
    assert torch.equal(at_risk(sampled.agreed, sampled.known), at_risk(whole.agreed, whole.known))
    assert not bool((sampled.known & (result.candidates < 0)).any())
    for name, pair in whole.sums().items():
        assert sampled.sums()[name].tolist() == pair.tolist()


def test_sampled_slots_draw_by_rollout_and_visit_not_by_the_clock(target, tmp_path: Path) -> None:
    weights = []
    for setting in (SlotSampling(), SlotSampling(), None):
        module = fitting.module(target, rollout=RecordedRollout(), sampling=setting)
        torch.rand(1 if weights else 3)  # the global generator stands elsewhere
        fit(module, tmp_path, Batches(*[batch(recorded(3), i) for i in range(2)]), 2)
        weights.append(fitting.weights(module)["drafter.fc.weight"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_sampled_rollout_labels_acceptance_by_what_is_to_be_expected(target) -> None:
    """sum_k prod_{j<k} [d_j = token] p_k(d_k), with the temperature and filters of the rollout; greedy counts."""
    live = LiveRollout(max_new_tokens=12, temperature=0.7, top_k=5)
    result, outcome = outcome_of(fitting.module(target, rollout=live, num_anchors=50), recorded(6))
    _, greedy = outcome_of(fitting.module(target, num_anchors=50), recorded(6))
    assert result.survival is not None and torch.equal(outcome.agreed, greedy.agreed)
    expected = torch.zeros(len(outcome.agreed))
    for n, row in enumerate(outcome.agreed.tolist()):
        for k, agreed in enumerate(row):
            expected[n] += float(result.survival[n, k])
            if not agreed:
                break
    torch.testing.assert_close(outcome.accepted, expected)
    assert bool((outcome.accepted != outcome.accepted.round()).any())
    assert torch.equal(greedy.accepted, greedy.agreed.long().cumprod(1).sum(1).float())


def test_gradient_norms_are_logged_on_request_and_change_nothing(target, tmp_path: Path) -> None:
    weights = []
    for every in (0, 2):
        watch = Watch()
        module = fitting.module(
            target, rollout=RecordedRollout(), sampling=SlotSampling(), log_gradient_norms_every=every
        )
        fit(module, tmp_path, Batches(*[batch(recorded(3), i) for i in range(3)]), 3, watch)
        weights.append(fitting.weights(module))
    names = {"grad_norm/loss/ce", "grad_norm/loss/rkl"}
    assert names <= set(watch.logged[0]) and all(watch.logged[0][name] > 0 for name in names)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    first, second, third = ([logged[name] for name in sorted(names)] for logged in watch.logged)
    assert first == second != third  # Lightning shows the last value until there is a new one: updates 1 and 3


# ---- refusals ----


def test_names_of_terms_are_unique(target) -> None:
    with pytest.raises(ValueError, match="share the name 'ce'"):
        fitting.module(target, losses=[TeacherCrossEntropy(name="ce"), TeacherCrossEntropy(name="ce")])
    module = fitting.module(target)
    with pytest.raises(ValueError, match="share the name 'rkl'"):
        module.add_loss(TotalVariation(name="rkl"))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_half_precision_master_weights_are_refused(target, tmp_path: Path, precision: str) -> None:
    """Norm gains near 1.0 would not move: the step of Adam is smaller than the format's resolution there."""
    with pytest.raises(UserError, match=r"trainer\.precision.*bf16-mixed"):
        fit(fitting.module(target), tmp_path, Batches(batch(recorded(2))), 1, precision=precision)


def test_bf16_mixed_keeps_fp32_master_weights_that_move(target, tmp_path: Path) -> None:
    module = fitting.module(
        target, optimizer=AdamWConfig(1e-4, 1e-4), rollout=RecordedRollout(), position_weight=Uniform()
    )
    before = fitting.weights(module)
    fit(module, tmp_path, Batches(*[batch(recorded(2, seed=i), i) for i in range(3)]), 3, precision="bf16-mixed")
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        if "norm" in name:
            assert (tensor != before[name]).float().mean() > 0.9, name


def test_the_trainers_own_clipping_is_refused(target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.gradient_clip_val.*model\.clip"):
        fit(fitting.module(target), tmp_path, Batches(batch(recorded(2))), 1, gradient_clip_val=1.0)


@pytest.mark.parametrize(
    "wrong", [{"num_anchors": 0}, {"anchor_mix": 1.5}, {"clip": 0.0}, {"log_gradient_norms_every": -1}]
)
def test_settings_out_of_range(target, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        fitting.module(target, **wrong)


def test_configure_model_is_idempotent_and_needs_no_trainer(target) -> None:
    module = fitting.module(target)
    before = {name: id(p) for name, p in module.named_parameters()}
    module.configure_model()  # a second call loads nothing: the name "tiny" does not exist
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert module.target is target
