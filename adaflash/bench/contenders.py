"""The ways to decode that a benchmark compares, as a trained module can play them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adaflash.errors import UserError
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import LengthPolicy
from adaflash.length.cost_aware import CostAware
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.length.survival import LearnsSurvival
from adaflash.module import AdaFlashModule

PAPER_RATE = 1.3
NAMES = {
    "plain": "plain decoding against itself: what this machine calls equal",
    "full": "the full block",
    "fixed": "the best fixed length, found on prompts that are not reported",
    "paper": f"the paper's adaptive head, rate {PAPER_RATE}",
    "cost": "survival + cost, always drafting",
    "cost_or_plain": "survival + cost, plain steps where drafting does not pay",
    "own": "the run's own policy",
}


@dataclass(frozen=True)
class Contender:
    """A way to decode. `make` gives a policy with fresh books; None: plain decoding. `fixed` gets its length later."""

    name: str
    make: Callable[[int], LengthPolicy] | None


def contenders(module: AdaFlashModule, asked: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Those that the module can play, plain first, and why the others cannot be; `asked` empty: all.

    Raises:
        UserError: one that was asked for by name needs a head that the checkpoint has not.
    """
    if unknown := [name for name in asked if name not in NAMES]:
        raise UserError(f"--policies: there is no {unknown[0]!r}; allowed are {', '.join(NAMES)}")
    missing = _missing(module.length)
    if absent := [name for name in asked if name in missing]:
        raise UserError(f"--policies {absent[0]}: {missing[absent[0]]}")
    chosen = [name for name in NAMES if name not in missing and (not asked or name in asked or name == "plain")]
    told = {name: why for name, why in missing.items() if not asked and name != "own"}
    return [Contender(name, _maker(name, module)) for name in chosen], told


def _missing(length: LengthPolicy) -> dict[str, str]:
    """Why some cannot be played."""
    missing = {}
    if not hasattr(length, "head"):
        missing["paper"] = f"the checkpoint has no length head (its policy is {length.describe()})"
    if not isinstance(length, LearnsSurvival):
        why = f"the checkpoint has no survival head (its policy is {length.describe()}); train one with -c length/survival"
        missing |= {"cost": why, "cost_or_plain": why}
    if isinstance(length, (FullBlock, FixedLength, CostAware)) or _is_the_papers(length):
        missing["own"] = f"the run's own policy, {length.describe()}, is among the others"
    return missing


def _is_the_papers(length: LengthPolicy) -> bool:
    return isinstance(length, AdaptiveLength) and (length.rate, length.minimum) == (PAPER_RATE, 1)


def _maker(name: str, module: AdaFlashModule) -> Callable[[int], LengthPolicy] | None:
    makers: dict[str, Callable[[int], LengthPolicy]] = {
        "full": lambda _: FullBlock(),
        "fixed": FixedLength,
        "paper": lambda _: _paper(module),
        "cost": lambda _: _cost(module, fall_back=False),
        "cost_or_plain": lambda _: _cost(module, fall_back=True),
        "own": lambda _: module.length,
    }
    return makers.get(name)


def _paper(module: AdaFlashModule) -> LengthPolicy:
    policy = AdaptiveLength(PAPER_RATE, 1)
    policy.build(module.target.hidden_size, module.drafter.block_size)
    policy.head.load_state_dict(module.length.head.state_dict())  # type: ignore[union-attr]
    return policy.to(module.target.device).eval()


def _cost(module: AdaFlashModule, fall_back: bool) -> LengthPolicy:
    """The heads of the checkpoint, with books that begin empty."""
    learnt = module.length
    assert isinstance(learnt, LearnsSurvival)
    policy = CostAware(fall_back, learnt.vocab_features)
    policy.build(module.target.hidden_size, module.drafter.block_size)
    for part in ("hazard", "head"):
        getattr(policy, part).load_state_dict(getattr(learnt, part).state_dict())
    return policy.to(module.target.device).eval()
