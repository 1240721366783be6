"""Run a function on several ranks over gloo, as torchrun would start them: about four seconds for two ranks.

    def job(folder):            # at the top level of a test file; runs once on every rank
        ...
        return {"loss": 1.0}    # plain values and tensors

    first, second = run_ranks(job, folder)

Lightning finds the environment of torchrun, so `Trainer(devices=2, strategy=...)` uses these processes and starts none.
Processes are forked from a server that has imported everything heavy. Several fits in one job share a process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_HEAVY = ("torch", "lightning.pytorch", "transformers.models.qwen3.modeling_qwen3", "torchmetrics", "pytest", "fitting",
          "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "adaflash.trainer_cli")  # fmt: skip


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    exitcode: int | None = None  # negative: killed by that signal
    value: Any = None  # what the job returned
    error: str = ""  # the traceback of what it raised
    output: str = ""  # stdout and stderr together
    seconds: float = 0.0  # from the start of all to the end of this one
    hung: bool = False  # had to be killed by us

    def __str__(self) -> str:
        state = "hung, killed; the stacks are below" if self.hung else f"exit {self.exitcode}, {self.seconds:.1f} s"
        return f"--- rank {self.rank} ({state}) ---\n{self.output.strip()}\n{self.error}"


def run_ranks(job: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60, nodes: int = 1) -> list[Any]:
    """What `job(*args)` returned on every rank; an AssertionError with every rank's output if one failed or hung."""
    ended = outcomes(job, *args, world=world, timeout=timeout, nodes=nodes)
    assert all(each.exitcode == 0 and not each.hung for each in ended), "\n" + "\n".join(map(str, ended))
    return [each.value for each in ended]


def outcomes(job: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60, nodes: int = 1) -> list[Outcome]:
    """How every rank ended; for jobs that are meant to fail. A rank that is alive after `timeout` is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_HEAVY, "ranks"])
    where = job.__code__.co_filename, job.__qualname__
    with tempfile.TemporaryDirectory() as folder, _paths():
        port = _free_port()
        ranks = [
            context.Process(target=_rank, args=(rank, world, nodes, port, where, args, folder, timeout))
            for rank in range(world)
        ]
        start = time.monotonic()
        for process in ranks:
            process.start()
        ended = [Outcome(rank) for rank in range(world)]
        _wait(ranks, ended, start, timeout)
        for process, outcome in zip(ranks, ended, strict=True):
            outcome.exitcode = process.exitcode
            _read(outcome, Path(folder))
    return ended


def _wait(ranks: list[Any], ended: list[Outcome], start: float, timeout: float) -> None:
    """Until all have ended; the stacks of one that hangs go into its output before it is killed."""
    while alive := [(p, o) for p, o in zip(ranks, ended, strict=True) if not o.seconds]:
        late = time.monotonic() - start > timeout
        for process, outcome in alive:
            if not process.is_alive():
                outcome.seconds = time.monotonic() - start
            elif late:
                outcome.hung, outcome.seconds = True, time.monotonic() - start
                os.kill(process.pid, signal.SIGUSR1)
        if late:
            time.sleep(0.3)
        time.sleep(0.02)
    for process, outcome in zip(ranks, ended, strict=True):
        if outcome.hung:
            process.kill()
        process.join()


def _read(outcome: Outcome, folder: Path) -> None:
    outcome.output = (folder / f"{outcome.rank}.txt").read_text(errors="replace")
    with contextlib.suppress(FileNotFoundError, EOFError):
        outcome.value, outcome.error = pickle.loads((folder / f"{outcome.rank}.pickle").read_bytes())


def _rank(
    rank: int,
    world: int,
    nodes: int,
    port: int,
    where: tuple[str, str],
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
) -> None:
    """One rank, from its environment to its result."""
    signal.alarm(int(timeout) + 30)  # should the tests be killed themselves
    output = os.open(f"{folder}/{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    local = world // nodes
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    value, error = None, ""
    try:
        value = _load(*where)(*args)
    except BaseException:
        error = traceback.format_exc()
    Path(f"{folder}/{rank}.pickle").write_bytes(pickle.dumps((value, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)  # nothing at exit may wait for a rank that is gone


def _load(path: str, name: str) -> Callable[..., Any]:
    """A function of a test file; pytest imports those under names that no other process knows."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _paths() -> Any:
    """The server must find the test helpers, and this tree before an installed one."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), *before.split(os.pathsep)])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
