"""A term from another file: registered once, refused under a name that is taken, learning with the rest."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from adaflash.callbacks.confidence_penalty import ConfidencePenalty, negative_entropy
from adaflash.losses import LossTerm, TotalVariation, check_names
from adaflash.plugin import LossPlugin


class Host(LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = nn.ModuleList()

    def add_loss(self, term):
        check_names([*self.losses, term])
        self.losses.append(term)


class Learned(LossTerm):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, student, teacher, token):
        return self.scale * student[:, 0]


def test_setup_registers_once():
    host, plugin, trainer = Host(), LossPlugin(Learned()), Trainer(logger=False)
    plugin.setup(trainer, host, "fit")
    plugin.setup(trainer, host, "test")
    assert list(host.losses) == [plugin.term]
    assert [name for name, _ in host.named_parameters()] == ["losses.0.scale"]


def test_two_plugins_of_one_name_are_refused():
    host, trainer = Host(), Trainer(logger=False)
    ConfidencePenalty().setup(trainer, host, "fit")
    with pytest.raises(ValueError, match="share the name 'confidence_penalty'"):
        ConfidencePenalty(weight=0.1).setup(trainer, host, "fit")
    ConfidencePenalty(name="other").setup(trainer, host, "fit")


def test_plugins_keep_apart_in_a_checkpoint():
    keys = {LossPlugin(TotalVariation(name=name)).state_key for name in ("a", "b")}
    assert len(keys) == 2


def test_a_module_without_add_loss_is_named():
    with pytest.raises(TypeError, match="LightningModule"):
        LossPlugin(TotalVariation()).setup(Trainer(logger=False), LightningModule(), "fit")


def test_a_function_becomes_a_plugin():
    plugin = LossPlugin.of(negative_entropy, 0.5)
    assert (plugin.term.name, plugin.term.weight) == ("negative_entropy", 0.5)
    student = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert plugin.term(student, student, torch.tensor([0])).item() == pytest.approx(-1.0397, abs=1e-4)
