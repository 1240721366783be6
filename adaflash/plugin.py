"""A loss term that another file adds, without a line changed in this package."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from adaflash.losses import FunctionTerm, LossFunction, LossTerm


class LossPlugin(Callback):
    """Adds one term to the loss of an `AdaFlashModule`: a file in `callbacks/` (or yours) and a line of YAML.

    A term with parameters learns with the drafter: it is registered before the optimizer is made.

        trainer:
          callbacks+:
            - class_path: adaflash.plugin.LossPlugin
              init_args:
                term: {class_path: adaflash.losses.TotalVariation, init_args: {weight: 0.1, name: tv}}

    Args:
        term: what is added; its name must be new to the module.
    """

    def __init__(self, term: LossTerm) -> None:
        self.term = term

    @classmethod
    def of(cls, function: LossFunction, weight: float = 1.0, name: str = "") -> LossPlugin:
        """A plugin around a plain function fn(student [M, V], teacher [M, V], token [M]) -> [M]."""
        return cls(FunctionTerm(function, weight, name))

    @property
    def state_key(self) -> str:
        """One key per term, so that two plugins of one class keep apart in a checkpoint."""
        return f"{type(self).__qualname__}[{self.term.name}]"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the term; runs before the optimizer is configured. a second `fit` or a `test` finds it there."""
        module: Any = pl_module
        if not hasattr(module, "add_loss"):
            raise TypeError(f"{type(self).__name__} needs a module with `add_loss`, got {type(pl_module).__name__}")
        if not any(known is self.term for known in module.modules()):
            module.add_loss(self.term)
