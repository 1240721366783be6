"""Losses: pure divergences, the terms made of them, and position weights. Imports torch only."""

from adaflash.losses.base import Evaluation, FunctionTerm, LossFunction, LossTerm, check_names
from adaflash.losses.numerics import NumericalError
from adaflash.losses.position import (
    DynamicConfidence,
    ExponentialDecay,
    FirstMismatch,
    FirstPass,
    PositionWeight,
    Uniform,
)
from adaflash.losses.sampling import SlotSampling
from adaflash.losses.terms import (
    ForwardKL,
    JensenShannon,
    NegativeLogAcceptance,
    ReverseKL,
    TeacherCrossEntropy,
    TokenCrossEntropy,
    TotalVariation,
)

__all__ = [
    "DynamicConfidence",
    "Evaluation",
    "ExponentialDecay",
    "FirstMismatch",
    "FirstPass",
    "ForwardKL",
    "FunctionTerm",
    "JensenShannon",
    "LossFunction",
    "LossTerm",
    "NegativeLogAcceptance",
    "NumericalError",
    "PositionWeight",
    "ReverseKL",
    "SlotSampling",
    "TeacherCrossEntropy",
    "TokenCrossEntropy",
    "TotalVariation",
    "Uniform",
    "check_names",
]
