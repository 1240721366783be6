"""Time and memory of the objective (forward + backward) beside plain unchunked PyTorch, in one run.

    python benchmarks/objective.py                 # one thread and two, five rounds
    python benchmarks/objective.py --quick --json  # one thread, two rounds; the last line is JSON

The ways, interleaved round by round on the same tensors, the best round of each:
    plain    the oracle, `adaflash.losses.oracle.plain_loss`: every logit at once, autograd
    lean     the same objective as one would write it in ten lines (F.cross_entropy, p (log p - log q) clipped)
    ours     DraftStep: chunked, closed-form gradients, the teacher once per position
    sampled  the same with importance-sampled slots
    limit    nothing but the three matrix products that `ours` needs, at their best chunk
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.blocks import teacher_positions
from adaflash.losses import ExponentialDecay, ReverseKL, SlotSampling, TeacherCrossEntropy
from adaflash.losses.oracle import plain_loss
from adaflash.step import DraftStep
from adaflash.types import Blocks

SHAPES = {  # vocabulary, hidden, blocks, block size, response positions
    "smollm2": (49_152, 576, 64, 16, 448),
    "qwen": (151_936, 1_024, 32, 16, 448),
}
TERMS = [TeacherCrossEntropy(weight=0.8, name="ce"), ReverseKL(weight=0.2, name="rkl")]
WAYS = ("plain", "lean", "ours", "sampled", "limit")


@dataclass
class Case:
    """Random states of one shape; labels agree with the drafter with probability 0.6, as after some training."""

    vocabulary: int
    size: int
    count: int
    block: int
    span: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(self.vocabulary, self.size, generator=generator).mul_(3 / self.size**0.5)
        self.teacher = torch.randn(self.span, self.size, generator=generator)
        self.hidden = torch.randn(self.count, self.block, self.size, generator=generator).requires_grad_()
        anchors = torch.randperm(self.span - self.block, generator=generator)[: self.count].sort().values
        everything = torch.ones(self.count, self.block - 1, dtype=torch.bool)
        labels = torch.randint(self.vocabulary, everything.shape, generator=generator)
        none = torch.zeros(self.count, dtype=torch.int64)
        self.blocks = Blocks(none, anchors, none[:, None].expand(-1, self.block), labels, everything, everything[:, 0])
        with torch.no_grad():
            drafted = DraftStep([], ExponentialDecay())(self.hidden, self.blocks, None, None, self.head).candidates
        agree = torch.rand(everything.shape, generator=generator) < 0.6
        labels[agree] = drafted[agree]

    def head(self, states: Tensor) -> Tensor:
        return states @ self.matrix.T

    def step(self, chunk: int, sampling: SlotSampling | None = None) -> None:
        step = DraftStep(TERMS, ExponentialDecay(), chunk, sampling=sampling)
        self._backward(step(self.hidden, self.blocks, self.teacher, torch.zeros_like(self.blocks.rows), self.head).loss)

    def plain(self) -> None:
        taught = self.teacher[teacher_positions(self.blocks.anchors, self.block)]
        weight = ExponentialDecay()(self.blocks.supervised)
        self._backward(plain_loss(self.hidden, self.blocks.labels, weight, taught, TERMS, self.head))

    def lean(self) -> None:
        weight = ExponentialDecay()(self.blocks.supervised).flatten()
        student = self.head(self.hidden[:, 1:].flatten(0, 1))
        teacher = self.head(self.teacher[teacher_positions(self.blocks.anchors, self.block)].flatten(0, 1))
        log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
        p = log_s.exp()
        rkl = (p * (log_s - log_t) - p + log_t.exp()).clamp(max=0.01).sum(-1)
        loss = 0.8 * F.cross_entropy(student, teacher.argmax(-1), reduction="none") + 0.2 * rkl
        self._backward((weight * loss).sum())

    @torch.no_grad()
    def limit(self, chunk: int) -> None:
        """Logits of every row and every position that teaches, and the gradient of every row."""
        positions = teacher_positions(self.blocks.anchors, self.block).unique()
        rows = self.hidden[:, 1:].flatten(0, 1)
        logits = torch.empty(chunk, self.vocabulary)
        for states, back in ((rows, True), (self.teacher[positions], False)):
            for part in states.split(chunk):
                torch.mm(part, self.matrix.T, out=logits[: len(part)])
                if back:
                    torch.mm(logits[: len(part)], self.matrix)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        self.hidden.grad = None


def peak_mib(run: Callable[[], None]) -> float:
    """Largest resident memory during `run` above what was held before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])


def measure(case: Case, chunk: int, threads: int, rounds: int) -> dict[str, float]:
    """Seconds (the best round) and peak MiB of each way, and their ratios."""
    torch.set_num_threads(threads)
    ways: dict[str, Callable[[], None]] = {
        "plain": case.plain,
        "lean": case.lean,
        "ours": lambda: case.step(chunk),
        "sampled": lambda: case.step(chunk, SlotSampling()),
        "limit": lambda: case.limit(256),
    }
    memory = {way: peak_mib(run) for way, run in ways.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)

    def ratio(above: str, below: str) -> float:
        return min(seconds[above]) / min(seconds[below])

    found = {f"{way}_s": min(seconds[way]) for way in WAYS}
    found |= {f"{way}_mib": memory[way] for way in WAYS}
    found |= {"time_ratio": ratio("plain", "ours"), "sampled_time_ratio": ratio("plain", "sampled")}
    found |= {"lean_time_ratio": ratio("lean", "ours"), "lean_sampled_time_ratio": ratio("lean", "sampled")}
    found |= {"memory_ratio": memory["plain"] / memory["ours"], "over_limit": ratio("ours", "limit")}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one thread, two rounds")
    parser.add_argument("--rounds", type=int, help="rounds after the warm-up (5, or 2 with --quick)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--chunk", type=int, default=192, help="rows whose logits exist at one time")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only these shapes")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in options.shape or SHAPES:
        case = Case(*SHAPES[name])
        for threads in (1,) if options.quick else (1, 2):
            found = measure(case, options.chunk, threads, options.rounds or (2 if options.quick else 5))
            results[name if threads == 1 else f"{name}_{threads}_threads"] = found
            print(f"{name}, {SHAPES[name]}, {threads} thread(s)")
            for way in WAYS:
                print(f"  {way:8} {found[f'{way}_s']:8.2f} s {found[f'{way}_mib']:9.0f} MiB")
            print(
                "  " + ", ".join(f"{key} {value:.2f}" for key, value in found.items() if not key.endswith(("_s", "b")))
            )
    if os.getloadavg()[0] > torch.get_num_threads() + 1:
        print(f"the machine was busy (load {os.getloadavg()[0]:.1f}): ratios hold better than seconds")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
