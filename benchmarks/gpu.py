"""What training and decoding cost on one device at the shapes of a target, beside what `adaflash plan` says.

    python benchmarks/gpu.py --output gpu.jsonl                 # Qwen3-8B shapes, random weights, one CUDA device
    python benchmarks/gpu.py --shape tiny --output tiny.jsonl   # seconds on a CPU: what the tests run

One cell after another, each one JSON line, appended whole. Cells that the file holds already (same shape, device and
versions) are left out, so that a run that was stopped goes on; after --minutes no new cell is begun. Cells:

    update       seconds of an update by part (drafter, vocabulary, backward, optimizer), its peak and that of a rollout,
                 beside the plan's
    verify-R     milliseconds of one packed verify pass of R requests, by window
    decode-R     seconds of a round with R requests: plain, full block, and windows as a trained length head would choose
                 at --tau; weights are random, so seconds count and acceptance does not
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from adaflash.decoding.cache import LanePool
from adaflash.decoding.engine import Engine
from adaflash.decoding.sampling import best_tokens
from adaflash.drafters.dflash import DFlash
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import LengthPolicy
from adaflash.length.fixed import FullBlock
from adaflash.losses import ReverseKL, TeacherCrossEntropy
from adaflash.module import AdaFlashModule
from adaflash.plan.estimate import Plan, estimate
from adaflash.plan.job import job_of
from adaflash.plan.layout import Layout
from adaflash.plan.meter import Meter
from adaflash.rollouts.live import LiveRollout
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Prompt, PromptBatch, Request, Segments

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
STANDS = ("target weights", "drafter weights", "length policy", "optimizer state", "rollout buffer")


@dataclass(frozen=True)
class Shape:
    """A target's config, and how much work the cells do."""

    config: dict[str, Any]
    dtype: str
    layers: int
    block: int
    anchors: int
    prompt: int
    response: int
    batch: int
    rollout: int
    loads: tuple[int, ...]
    rounds: int  # of the decode cells
    repeats: int


SHAPES = {
    "qwen3-8b": Shape(
        {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960},
        "bfloat16", 5, 16, 128, 512, 256, 4, 16, (1, 32, 128), 16, 10,
    ),
    "tiny": Shape(
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
        "float32", 2, 8, 8, 24, 16, 2, 4, (1, 4), 4, 2,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b" if CUDA else "tiny")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no cell after that; run again to go on")
    parser.add_argument("--tau", type=float, default=3.5, help="tokens a round that the length head expects")
    options = parser.parse_args()
    began, bench = time.monotonic(), Bench(SHAPES[options.shape], options.tau)
    about = {"shape": options.shape, "tau": options.tau, **machine()}
    done = cells_in(options.output, about)
    for name, cell in bench.cells():
        if name in done:
            print(f"{name}: done before", flush=True)
        elif time.monotonic() - began > 60 * options.minutes:
            print(f"{name}: not begun, the time is used up; the same command goes on here", flush=True)
        else:
            start = time.monotonic()
            result = cell()
            append(options.output, {"cell": name, **about, **result, "wall": round(time.monotonic() - start, 2)})
            print(f"{name}: {json.dumps(result)}", flush=True)


def machine() -> dict[str, str]:
    """What makes two lines comparable."""
    name = torch.cuda.get_device_name(DEVICE) if CUDA else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def cells_in(path: Path, about: dict[str, Any]) -> set[str]:
    """Cells that a file holds for this machine and shape; a line torn by a crash counts as none."""
    found = set()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if all(row.get(key) == value for key, value in about.items()):
            found.add(row["cell"])
    return found


def append(path: Path, row: dict[str, Any]) -> None:
    """One line in one write, on the disk before this returns; begins a new line after a torn one."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (("\n" if torn else "") + json.dumps(row) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def wait() -> None:
    """Until the device has done what it was given."""
    if CUDA:
        torch.cuda.synchronize(DEVICE)


class Peaks(Callback):
    """Largest memory of every batch beyond what stood before it, and the seconds of backward and optimizer."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.totals: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        wait()
        pl_module.watch.seconds.clear()
        self.before, self.meter = 0, None
        if CUDA:
            self.before = torch.cuda.memory_allocated(DEVICE)
            torch.cuda.reset_peak_memory_stats(DEVICE)
        else:
            self.meter = Meter()
            self.meter.__enter__()
        self.start = time.perf_counter()

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Any) -> None:
        pl_module.watch.start("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.watch.stop("backward")
        pl_module.watch.start("optimizer")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.watch.stop("optimizer")
        self.seconds = {**pl_module.watch.seconds, "whole": time.perf_counter() - self.start}
        if self.meter is not None:
            self.meter.__exit__(None, None, None)
            self.peaks.append(self.meter.peak)
        else:
            peak = torch.cuda.max_memory_allocated(DEVICE)
            self.peaks.append(peak - self.before)
            self.totals.append(peak)


class Batches(L.LightningDataModule):
    """Prompts of random tokens; every rollout is used twice."""

    def __init__(self, shape: Shape, rollouts: int) -> None:
        super().__init__()
        self.shape, self.rollouts = shape, rollouts

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        shape, visits = self.shape, 2 * self.shape.rollout // self.shape.batch
        made = [
            PromptBatch(tuple(prompts(shape, shape.rollout, number)), number, visit, visits, shape.batch, 0)
            for number in range(self.rollouts)
            for visit in range(visits)
        ]
        return DataLoader(made, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def prompts(shape: Shape, count: int, seed: int) -> list[Prompt]:
    """Prompts of random tokens, all of the longest length."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.config["vocab_size"], (count, shape.prompt), generator=made)
    return [Prompt(f"{seed}-{i}", "random", tuple(row)) for i, row in enumerate(ids.tolist())]


class Bench:
    """One target and drafter with random weights, and what is measured with them."""

    def __init__(self, shape: Shape, tau: float) -> None:
        self.shape, self.tau = shape, tau
        self.config = AutoConfig.for_model(
            "qwen3", **shape.config, eos_token_id=None, bos_token_id=None, pad_token_id=None
        )

    def cells(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Names and measurements, the most telling first."""
        yield "update", self.update
        for load in self.shape.loads:
            yield f"verify-{load}", lambda load=load: self.verify(load)  # type: ignore[misc]
        for load in self.shape.loads:
            yield f"decode-{load}", lambda load=load: self.decode(load)  # type: ignore[misc]

    @cached_property
    def target(self) -> HFTarget:
        """Made on the device, at once in its own number format."""
        torch.manual_seed(0)
        with DEVICE:
            return HFTarget(AutoModelForCausalLM.from_config(self.config, dtype=getattr(torch, self.shape.dtype)))

    def module(self) -> AdaFlashModule:
        """The module with the paper's parts; nothing is built yet."""
        shape = self.shape
        drafter = DFlash(shape.layers, shape.block, shape.layers, mask_id=0, init="random")
        losses = [TeacherCrossEntropy(0.8, "ce"), ReverseKL(weight=0.2, name="rkl")]
        rollout = LiveRollout(shape.response, lanes=shape.rollout)
        return AdaFlashModule(
            "random", drafter, AdaptiveLength(), rollout, losses, num_anchors=shape.anchors,
            target_options=TargetOptions(dtype=shape.dtype), max_new_tokens=shape.response,  # type: ignore[arg-type]
        )  # fmt: skip

    @cached_property
    def pair(self) -> tuple[DFlash, AdaptiveLength]:
        """A drafter for decoding, and a length head that expects `tau` tokens of every block."""
        drafter, policy = (
            DFlash(self.shape.layers, self.shape.block, self.shape.layers, mask_id=0, init="random"),
            AdaptiveLength(),
        )
        drafter.build(self.target)
        policy.build(self.target.hidden_size, self.shape.block)
        share = min(self.tau / self.shape.block, 0.99)
        with torch.no_grad():
            policy.head.out.weight.zero_()
            policy.head.out.bias.fill_(math.log(share / (1 - share)))
        return drafter.to(DEVICE), policy.to(DEVICE)

    def update(self) -> dict[str, Any]:
        """A few real steps of the trainer; the last one is warm and trains on a rollout that is there."""
        torch.manual_seed(0)
        module, peaks = self.module(), Peaks()
        module.configure_model(self.target)
        module.watch.wait = wait
        visits = 2 * self.shape.rollout // self.shape.batch
        trainer = L.Trainer(
            accelerator="gpu" if CUDA else "cpu", devices=1, precision="bf16-mixed" if CUDA else "32-true",
            max_steps=2 * visits, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, callbacks=[peaks],
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            trainer.fit(module, Batches(self.shape, 2))
            plan = self.plan(Path(folder))
        stands = sum(part.largest for part in plan.parts if part.name in STANDS)
        planned = max(plan.total("update"), plan.total("step")) - stands
        rollout = max(plan.total("rollout") - stands, planned)
        return {
            "seconds": {name: round(value, 4) for name, value in peaks.seconds.items()},
            "candidates": self.shape.batch * self.shape.anchors * (self.shape.block - 1),
            "peak_update": peaks.peaks[-1],
            "planned_update": planned,
            "update_ratio": round(peaks.peaks[-1] / planned, 3),
            "peak_rollout": peaks.peaks[visits],
            "planned_rollout": rollout,
            "rollout_ratio": round(peaks.peaks[visits] / rollout, 3),
            "peak_total": max(peaks.totals, default=None),
            "planned_total": plan.peak,
        }

    def plan(self, folder: Path) -> Plan:
        """What `adaflash plan` says of the same run."""
        self.config.save_pretrained(folder)
        module, shape = self.module(), self.shape
        module.target_name = str(folder)
        data = SimpleNamespace(
            max_prompt_tokens=shape.prompt,
            batch_size=shape.batch,
            rollout_size=shape.rollout,
            reuse=2,
            val_batch_size=1,
        )
        trainer = SimpleNamespace(
            precision="bf16-mixed" if CUDA else "32-true", accelerator="gpu" if CUDA else "cpu",
            accumulate_grad_batches=1, max_steps=1,
        )  # fmt: skip
        return estimate(job_of(module, data, trainer, Layout()))

    @torch.no_grad()
    def verify(self, load: int) -> dict[str, Any]:
        """Milliseconds of a pass by window: median of interleaved repeats."""
        shape, layers = self.shape, self.pair[0].context_layers
        context = shape.prompt + shape.response
        pool = LanePool(load, context + shape.block)
        widths = sorted({1, 2, shape.block // 4, shape.block // 2, shape.block})
        found: dict[int, list[float]] = {width: [] for width in widths}
        for turn in range(shape.repeats + 2):
            for width in widths:
                segments = Segments(tuple(range(load)), (context,) * load, (width,) * load)
                tokens = torch.arange(load * width, device=DEVICE) % self.target.embedding_rows
                wait()
                start = time.perf_counter()
                best_tokens(self.target.head(self.target.read(tokens, segments, layers, pool).hidden)).tolist()
                wait()
                if turn > 1:  # two turns warm up
                    found[width].append(1000 * (time.perf_counter() - start))
        milliseconds = {str(width): round(statistics.median(times), 3) for width, times in found.items()}
        return {"context": context, "milliseconds": milliseconds, "pool_bytes": pool.bytes()}

    def decode(self, load: int) -> dict[str, Any]:
        """Seconds of a round, plain and drafted, interleaved; and what a round is worth at `tau`."""
        drafter, adaptive = self.pair
        policies: dict[str, LengthPolicy | None] = {"plain": None, "full": FullBlock(), "adaptive": adaptive}
        limit = self.shape.rounds + 2 * self.shape.block  # no window is cut by the end of a response
        requests = [Request(each.tokens, limit) for each in prompts(self.shape, load, 7)]
        rounds: dict[str, list[float]] = {name: [] for name in policies}
        windows: dict[str, float] = {}
        for turn in range(3):
            for name, policy in policies.items():
                engine = Engine(self.target, None if policy is None else drafter, policy, lanes=load)
                for _ in engine.stream(requests):
                    if engine.passes["verify"] >= self.shape.rounds:
                        break
                seconds = sum(value for part, value in engine.seconds.items() if part != "prefill")
                if turn:
                    rounds[name].append(seconds / engine.passes["verify"])
                windows[name] = engine.passes["verify_rows"] / (engine.passes["verify"] * load)
        best = {name: min(times) for name, times in rounds.items()}
        return {
            "milliseconds_a_round": {name: round(1000 * value, 3) for name, value in best.items()},
            "rows_a_request": {name: round(value, 2) for name, value in windows.items()},
            "full_over_adaptive": round(best["full"] / best["adaptive"], 3),
            "tau_to_break_even": {name: round(best[name] / best["plain"], 3) for name in ("full", "adaptive")},
        }


if __name__ == "__main__":
    main()
