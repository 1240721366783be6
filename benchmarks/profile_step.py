"""Where the time of one update goes on a real target (the length policy, some milliseconds, left out), and what
importance-sampled slots add to the gradient's noise.

    python benchmarks/profile_step.py --rollouts rollouts.jsonl   # rows of `adaflash predict`: prompt_ids, response_ids

CPU seconds of this process (on one thread the same as time on a machine with nothing else to do).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from adaflash.drafters.dflash import DFlash
from adaflash.length.adaptive import AdaptiveLength
from adaflash.losses import ExponentialDecay, ReverseKL, SlotSampling, TeacherCrossEntropy
from adaflash.module import AdaFlashModule
from adaflash.rollouts.base import Players
from adaflash.rollouts.live import LiveRollout
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.step import DraftStep
from adaflash.targets.hf import TargetOptions
from adaflash.types import Prompt, PromptBatch, Trajectory

TERMS = [TeacherCrossEntropy(weight=0.8, name="ce"), ReverseKL(weight=0.2, name="rkl")]


class Clock:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def build(options: argparse.Namespace) -> AdaFlashModule:
    drafter = DFlash(num_layers=options.layers, block_size=options.block)
    mask = TargetOptions(mask_token=options.mask_token)
    module = AdaFlashModule(
        options.target, drafter, AdaptiveLength(), RecordedRollout(), TERMS, target_options=mask, num_anchors=64
    )
    module.configure_model()
    return module


def prompts(path: Path, count: int) -> list[Prompt]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[: 4 * count]]
    rows = [row for row in rows if len(row["response_ids"]) >= 96][:count]
    return [Prompt(r["id"], r["domain"], tuple(r["prompt_ids"]), tuple(r["response_ids"][:112])) for r in rows]


def update(module: AdaFlashModule, trajectories: list[Trajectory], visit: int, clock: Clock) -> None:
    """One forward and backward of a micro-batch; gradients are left in the drafter."""
    with clock("blocks"):
        batch = PromptBatch((), rollout_id=0, visit=visit, visits=8, rows=4, cursor=0)
        lesson = module._lesson(trajectories, module._chance(batch))
    with clock("drafter forward"):
        hidden = module._draft(lesson)
    with clock("vocabulary"):
        result = module._terms(hidden, lesson)
    with clock("drafter backward"):
        result.loss.backward()
    for parameter in module.drafter.parameters():
        if parameter.grad is not None:
            parameter.grad /= float(result.weight)


def gradient(module: AdaFlashModule, trajectories: list[Trajectory], visit: int) -> Tensor:
    module.zero_grad()
    update(module, trajectories, visit, Clock())
    return torch.cat([p.grad.flatten() for p in module.drafter.parameters() if p.grad is not None])


def noise(draw: Callable[[int], Tensor], count: int) -> tuple[float, float]:
    """Mean squared distance from the mean over its own square, and the bias of that mean against draw(-1)."""
    truth, found = draw(-1), torch.stack([draw(i) for i in range(count)])
    mean = found.mean(0)
    spread = (found - mean).square().sum(1).mean() * count / (count - 1)
    bias = ((mean - truth).square().sum() - spread / count).clamp(min=0).sqrt()
    return float(spread / truth.square().sum()), float(bias / truth.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--mask-token", default="<empty_output>")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--draws", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, clock = build(options), Clock()
    players = Players(module.target, module.drafter, module.length, 0, 0)
    chosen = prompts(options.rollouts, 16)
    with clock("rollout"):
        LiveRollout(max_new_tokens=96).collect(chosen, players)
    clock.seconds["rollout"] /= 8  # 16 prompts, 4 an update, each used twice
    trajectories = RecordedRollout().collect(chosen, players)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    for index in range(options.updates + 1):
        if index == 1:  # the first warms up
            clock.seconds = {"rollout": clock.seconds["rollout"]}
        module.zero_grad()
        update(module, trajectories[4 * index % 16 :][:4], index, clock)
        with clock("optimizer"):
            optimizer.step()
    for name in clock.seconds:
        clock.seconds[name] /= 1 if name == "rollout" else options.updates
    total = sum(clock.seconds.values())
    for name, value in clock.seconds.items():
        print(f"{name:18} {value:7.3f} s {100 * value / total:5.1f} %")
    print(f"{'an update':18} {total:7.3f} s")

    exact = DraftStep(TERMS, ExponentialDecay())
    sampled = DraftStep(TERMS, ExponentialDecay(), sampling=SlotSampling())

    def of_slots(index: int) -> Tensor:
        module.step = exact if index < 0 else sampled
        return gradient(module, trajectories[:4], 0)

    def of_anchors(index: int) -> Tensor:
        module.step = exact
        return gradient(module, trajectories[:4], index + 1)

    def of_trajectories(index: int) -> Tensor:
        module.step = exact
        return gradient(module, trajectories[4 * (index % 4) :][:4], 0)

    spread, bias = noise(of_slots, options.draws)
    print(f"gradient noise of sampled slots: variance / |g|^2 = {spread:.4f}, bias / |g| = {bias:.4f}")
    for name, draw, count in (("other anchors", of_anchors, options.draws), ("other trajectories", of_trajectories, 4)):
        spread, _ = noise(draw, count)
        print(f"beside that of {name}: variance / |g|^2 = {spread:.4f}")


if __name__ == "__main__":
    main()
