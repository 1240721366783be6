"""Around the step: what a lesson gives to the loss, to the length policy, and to the log of an update."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adaflash.length.base import Outcome
from adaflash.lesson import Lesson
from adaflash.losses.numerics import NumericalError
from adaflash.losses.teach import Head
from adaflash.step import DraftStep, StepResult, acceptance
from adaflash.types import Blocks
from adaflash.vocabulary import DraftHead


def sum_terms(
    step: DraftStep,
    hidden: Tensor,
    lesson: Lesson,
    head: Head,
    drafted: DraftHead,
    chance: torch.Generator | None,
    when: str,
) -> StepResult:
    """The step over a lesson. Arguments are those of `DraftStep`; `when` begins a message.

    A row that is no distribution is told of, and leaves a gradient that is not finite: the other ranks are in the same
    collectives, and all of them drop the update or stop.
    """

    def run(what: Lesson) -> StepResult:
        return step(hidden, what.blocks, what.teacher, what.offsets, head, chance, drafted)

    try:
        return run(lesson)
    except NumericalError as error:
        print(
            f"{when}: {error.what}: {lesson.place(error.row)} {error.problem}; this window teaches nothing", flush=True
        )
        silent = run(lesson.silent())
        return replace(silent, loss=silent.loss * float("nan"))


def outcome_of(hidden: Tensor, blocks: Blocks, result: StepResult, drafted: DraftHead) -> Outcome:
    """How far each block survives beside the trajectory; what it teaches never reaches the drafter.

    Candidates that were never computed are not known, and count neither as right nor as wrong.
    """
    known = (blocks.supervised & (result.candidates >= 0)).cumprod(1).bool()
    agreed = (result.candidates == blocks.labels) & known
    return Outcome(hidden.detach(), acceptance(result, blocks), blocks.full & known[:, 0], agreed, known, drafted)


def log_sums(
    step: DraftStep, hidden: Tensor, lesson: Lesson, head: Head, drafted: DraftHead, norms: bool
) -> dict[str, Tensor]:
    """Beside the sums of result and outcome: what a limited vocabulary costs, and on request the norms of the terms."""
    blocks, sums = lesson.blocks, dict[str, Tensor]()
    if drafted.vocabulary:
        sums |= drafted.vocabulary.bounds(blocks.labels, blocks.supervised, blocks.full)
    if norms:
        sums |= step.gradient_norms(hidden, blocks, lesson.teacher, lesson.offsets, head, drafted)
    return sums
