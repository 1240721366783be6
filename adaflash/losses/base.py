"""A loss term: one named, weighted contribution per candidate. Masks, position weights and sums live in `step.py`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from adaflash.errors import UserError
from adaflash.vocabulary import DraftVocabulary

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""fn(student logits [M, V], teacher logits [M, V], token [M]) -> loss [M]."""


@dataclass(frozen=True)
class Evaluation:
    """A term on M rows, and shares for the log as (numerator [M], denominator [M]) of their weighted sums."""

    values: Tensor  # [M]
    shares: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class LossTerm(nn.Module, ABC):
    """One named, weighted contribution to the loss; a new one is a class with `forward` and a line of YAML.

    Args:
        weight: factor of this term in the loss.
        name: unique name in the log (`loss/{name}`); the class's name where empty.
    """

    share_names: tuple[str, ...] = ()  # of `evaluate`: declared, so that every rank logs the same keys
    covers: bool = False  # True: infinite where the student cannot say what the teacher may (a limited drafter)
    needs_teacher: bool = True  # False: `forward` gets None for the teacher, whose logits are then never computed

    def __init__(self, weight: float = 1.0, name: str = "") -> None:
        super().__init__()
        self.weight = weight
        self.name = name or type(self).__name__
        if not math.isfinite(weight):  # a negative one rewards, as for an entropy
            raise UserError(f"weight of the loss term {self.name} must be a finite number, got {weight}")

    @abstractmethod
    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """Loss per candidate [M] from logits [M, V], [M, V] and token ids [M]; unweighted, never reduced."""

    def evaluate(self, student: Tensor, teacher: Tensor, token: Tensor) -> Evaluation:
        """`forward`, with shares for the log where a term has some."""
        return Evaluation(self(student, teacher, token))

    def begin(self, total_weight: float) -> None:
        """Called once per micro-batch before its rows, with the sum of their position weights."""


class FunctionTerm(LossTerm):
    """A plain function as a term: it is run, and differentiated, chunk by chunk without knowing it.

    Args:
        function: fn(student, teacher, token) -> [M].
        weight: factor of this term in the loss.
        name: unique name in the log; the function's name where empty.
        needs_teacher: False if the function does not look at the teacher (it gets None).
    """

    def __init__(self, function: LossFunction, weight: float = 1.0, name: str = "", needs_teacher: bool = True) -> None:
        super().__init__(weight, name or getattr(function, "__name__", type(function).__name__))
        self.function = function
        self.needs_teacher = needs_teacher

    def forward(self, student: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
        """The function's value."""
        return self.function(student, teacher, token)


def check_names(terms: Iterable[LossTerm]) -> None:
    """Refuse two terms of one name, and names with a dot (they become keys of a ModuleDict and of the log).

    Raises:
        ValueError: naming the classes that share a name, or the name with the dot.
    """
    terms = list(terms)
    for name, count in Counter(term.name for term in terms).items():
        classes = " and ".join(type(term).__name__ for term in terms if term.name == name)
        if count > 1:
            raise ValueError(f"{count} loss terms share the name {name!r} ({classes}): give each its own `name`")
        if "." in name:
            raise ValueError(f"the name {name!r} of loss term {classes} has a dot: use a letter, digit, _ or -")


def check_said(said: DraftVocabulary | None, terms: Iterable[LossTerm]) -> None:
    """Refuse terms that are infinite for a drafter with a limited vocabulary.

    Raises:
        UserError: naming them.
    """
    wrong = [f"{term.name} ({type(term).__name__})" for term in terms if term.covers]
    if said is not None and wrong:
        raise UserError(
            f"model.losses: {' and '.join(wrong)} would be infinite, since the drafter cannot say all that the target may "
            "(model.drafter.init_args.vocabulary). Use ReverseKL, JensenShannon, TotalVariation or a cross-entropy, or "
            "leave the vocabulary whole"
        )
