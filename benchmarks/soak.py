"""Kill a real run at random, again and again, and compare it with one that was left alone: losses, data order, weights.

    python benchmarks/soak.py --updates 400 --kills 10

trains the quickstart's pair twice in `--folder`: once undisturbed, once with SIGTERM, Ctrl-C and SIGKILL at random moments
(in the midst of rollouts, updates, validations, checkpoints and start-ups), each time resumed with `--ckpt_path last`.
Prints what was compared, and the memory of the undisturbed run. Exit status 1: something differs, or memory grows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import adaflash
from adaflash.provenance import code_state

SETTINGS = """
overwrite: false
model:
  rollout: {init_args: {max_new_tokens: 48}}
  max_new_tokens: 16
data: {reuse: 4, num_workers: 2, val_prompts: 1}
trainer: {val_check_interval: 40, log_every_n_steps: 1, enable_progress_bar: false, callbacks+: [{class_path: soak.Diary}]}
last: {every_n_train_steps: 10}
gain: {after: validate}
"""


class Diary(Callback):
    """One line an update in `diary.jsonl` of the run folder: what was trained on, the loss to the last bit, memory.

    Args:
        name: The file.
    """

    def __init__(self, name: str = "diary.jsonl") -> None:
        self.name = name

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        ids = [prompt.id for prompt in batch.prompts]
        line = [trainer.global_step, batch.rollout_id, batch.visit, ids, float(outputs["loss"]).hex()]
        with (Path(trainer.default_root_dir) / self.name).open("a") as file:
            file.write(json.dumps({"line": line, "mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}) + "\n")


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--updates", type=int, default=400)
    ask.add_argument("--kills", type=int, default=10)
    ask.add_argument("--longest", type=float, default=60.0, help="most seconds of training between two kills")
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--folder", type=Path, default=Path("runs/soak"))
    asked = ask.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "soak.yaml").write_text(SETTINGS)
    began = time.monotonic()
    straight, killed = asked.folder / "straight", asked.folder / "killed"
    code = json.dumps([code_state(Path(adaflash.__file__)), asked.updates], sort_keys=True)
    done = straight / "done"
    if not done.exists() or done.read_text() != code:  # kept, so that several disturbed runs share it
        shutil.rmtree(straight, ignore_errors=True)
        finish(start(asked, straight), straight)
        done.write_text(code)
    print(f"undisturbed: {asked.updates} updates in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    shutil.rmtree(killed, ignore_errors=True)
    signals = disturb(asked, killed)
    if json.dumps([code_state(Path(adaflash.__file__)), asked.updates], sort_keys=True) != code:
        print("the code changed in the meantime: the runs cannot be compared; use a copy that nobody edits")
        return 1
    print(f"disturbed: {len(signals)} kills ({', '.join(signals)}) in {time.monotonic() - began:.0f} s", flush=True)
    return report(straight, killed)


def start(asked: argparse.Namespace, run: Path) -> subprocess.Popen[bytes]:
    """`adaflash fit`, in a process group of its own; goes on where the run stands, or begins."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = ["fit", "-c", "experiment/quickstart", "-c", str(asked.folder / "soak.yaml"), "--run", str(run),
             "--trainer.max_steps", str(asked.updates), "--ckpt_path", "last"]  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    with (run / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "adaflash.cli", *words],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], run: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"fit ended with status {process.returncode}; see {run / 'output.txt'}")


def disturb(asked: argparse.Namespace, run: Path) -> list[str]:
    """Kill and resume until there were enough kills or the run is through; returns the signals that were sent."""
    chance, sent = random.Random(asked.seed), []
    while len(sent) < asked.kills:
        process = start(asked, run)
        known = len(lines(run))
        while (
            process.poll() is None and len(lines(run)) == known and chance.random() > 0.01
        ):  # sometimes while it starts
            time.sleep(0.5)
        time.sleep(chance.uniform(0, asked.longest))
        number = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        status = process.wait()
        sent.append(f"{signal.Signals(number).name[3:]} at {len(lines(run)) and lines(run)[-1]['line'][0]} -> {status}")
        print(sent[-1], flush=True)
    process = start(asked, run)
    finish(process, run)
    return sent


def lines(run: Path) -> list[dict[str, Any]]:
    """The diary; a last line that a kill cut off is left out."""
    path = run / "diary.jsonl"
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def report(straight: Path, killed: Path) -> int:
    """Compare the two runs; 0 if they are the same and memory stays flat."""
    one, other = ({tuple(each["line"][:3]): each["line"] for each in lines(run)} for run in (straight, killed))
    same = [key for key in one if other.get(key) == one[key]]
    print(f"updates with the same prompts and the same loss, bit for bit: {len(same)} of {len(one)} and {len(other)}")
    weights = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (straight, killed)
    ]
    equal = sum(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    print(f"equal weights at the end: {equal} of {len(weights[0])}")
    memory = [each["mb"] for each in lines(straight)]
    third = max(1, len(memory) // 3)
    early, late = max(memory[third : 2 * third] or memory), max(memory[-third:])
    print(f"memory of the undisturbed run: at most {early:.0f} MB in its second third, {late:.0f} MB in its last")
    fine = len(same) == len(one) == len(other) and equal == len(weights[0]) and late < 1.05 * early
    print("the same" if fine else "NOT the same")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
