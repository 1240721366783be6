"""`adaflash` in processes of its own, forked from one that has imported everything already: a second a run, not ten."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

import ranks

_CONTEXT = multiprocessing.get_context("forkserver")
_HEAVY = ["transformers.models.llama.modeling_llama", "torch.utils.tensorboard", "matplotlib.pyplot"]
_CONTEXT.set_forkserver_preload([*ranks._HEAVY, "ranks", *_HEAVY])  # one server for both


def start(words: list[str], folder: Path, output: Path) -> BaseProcess:
    """Run `adaflash WORDS` in a folder and a process group of its own; both streams go to a file."""
    process = _CONTEXT.Process(target=_run, args=(words, folder, output))
    process.start()
    return process


def finish(process: BaseProcess, output: Path, seconds: float = 120) -> tuple[int, str]:
    """Exit status (minus the signal if one ended it) and what was shown."""
    process.join(seconds)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(10)
        raise AssertionError(f"still running after {seconds:g} s:\n{output.read_text()}")
    assert process.exitcode is not None
    return process.exitcode, output.read_text()


def adaflash(words: list[str], folder: Path, seconds: float = 120) -> tuple[int, str]:
    """Start and finish."""
    output = folder / "output.txt"
    return finish(start(words, folder, output), output, seconds)


def _run(words: list[str], folder: Path, output: Path) -> None:
    os.setsid()
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    import torch

    from adaflash.cli import main

    torch.set_num_threads(1)
    try:
        status = main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
