"""The loss plugins of callbacks/: their formulas, and the schedule of a weight."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adaflash.callbacks.calibrated_student import CalibratedStudent, CalibrationTerm
from adaflash.callbacks.confidence_penalty import ConfidencePenalty
from adaflash.callbacks.loss_schedule import LossSchedule
from adaflash.callbacks.margin import Margin, MarginTerm
from adaflash.losses import ForwardKL, TotalVariation

TOKEN = torch.tensor([0])


def test_margin_by_hand():
    teacher = torch.tensor([[0.0, 3.0, 1.0]])
    term = MarginTerm(margin=1.0)
    for student, expected in (((2.0, 1.5, 0.0), 1.5), ((0.0, 5.0, 1.0), 0.0), ((0.0, 0.4, 0.0), 0.6)):
        assert term(torch.tensor([student]), teacher, TOKEN).item() == pytest.approx(expected)


def test_calibration_is_the_forward_kl_and_its_temperature_learns():
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    term = CalibrationTerm()
    entropy = -(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1)
    assert torch.allclose(term(student, teacher, TOKEN) - entropy, ForwardKL()(student, teacher, TOKEN), atol=1e-5)
    too_sure = 5 * teacher
    term(too_sure, teacher, TOKEN).sum().backward()
    assert term.log_temperature.grad < 0  # a higher temperature lowers the loss


@pytest.mark.parametrize("plugin", [ConfidencePenalty, Margin, CalibratedStudent])
def test_settings_reach_the_term(plugin):
    made = plugin(weight=0.7, name="mine")
    assert (made.term.weight, made.term.name) == (0.7, "mine")
    assert made.term.evaluate(torch.randn(3, 5), torch.randn(3, 5), torch.tensor([0, 1, 2])).values.shape == (3,)


def test_schedule_by_hand():
    schedule = LossSchedule("tv", start=1.0, end=3.0, steps=10, begin=5)
    assert [schedule.weight(step) for step in (0, 5, 10, 15, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    cosine = LossSchedule("tv", start=0.0, end=1.0, steps=4, shape="cosine")
    assert cosine.weight(1) == pytest.approx((1 - math.cos(math.pi / 4)) / 2)


def test_schedule_sets_and_logs_the_weight():
    module = SimpleNamespace(losses=nn.ModuleList([TotalVariation(name="tv")]), logged={})
    module.log = lambda name, value, **_: module.logged.update({name: value})
    schedule = LossSchedule("tv", start=1.0, end=3.0, steps=10)
    trainer = SimpleNamespace(global_step=5, callbacks=[schedule])
    schedule.on_train_start(trainer, module)
    schedule.on_train_batch_start(trainer, module, None, 0)
    assert module.losses[0].weight == 2.0 and module.logged == {"loss_weight/tv": 2.0}


def test_schedule_refuses_what_it_cannot_mean():
    module = SimpleNamespace(losses=nn.ModuleList([TotalVariation(name="tv")]))
    trainer = SimpleNamespace(callbacks=[])
    with pytest.raises(ValueError, match=r"no loss term is named 'rkl' \(there are: tv\)"):
        LossSchedule("rkl").on_train_start(trainer, module)
    trainer.callbacks = [LossSchedule("tv"), LossSchedule("tv")]
    with pytest.raises(ValueError, match="2 schedules"):
        trainer.callbacks[0].on_train_start(trainer, module)
    with pytest.raises(ValueError, match="steps"):
        LossSchedule(steps=0)
