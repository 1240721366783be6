"""The cache of fetched targets: a folder appears whole or not at all, and says itself what must be in it.

Everything is made in a work folder beside the final one, under a lock (two processes do the work once), and one rename
publishes it. The manifest in the folder lists size and SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

MANIFEST = "adaflash-manifest.json"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The folder of fetched targets: `cache_dir`, else $ADAFLASH_CACHE, else ~/.cache/adaflash; then `targets/`."""
    root = cache_dir or os.environ.get("ADAFLASH_CACHE") or Path.home() / ".cache" / "adaflash"
    return Path(root).expanduser().absolute() / "targets"


def damage(folder: Path, origin: str, hashes: bool) -> str:
    """What is wrong with a cached folder, empty if nothing: manifest, origin, sizes and (reads it all) SHA-256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, made_from = dict(manifest["files"]), manifest["origin"]
        wants = {folder / name: (int(want["bytes"]), str(want["sha256"])) for name, want in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return "it has no readable manifest"
    if made_from != origin:
        return "it was made from another source file"
    for path, (size, digest) in wants.items():
        if not path.is_file() or path.stat().st_size != size:
            return f"{path.name} is missing or has the wrong size"
        if hashes and sha256(path) != digest:
            return f"{path.name} has the wrong SHA-256"
    return ""


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, origin: str, **about: str) -> None:
    """Write the manifest of a finished folder: its origin (a SHA-256) and every file's size and SHA-256."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"origin": origin, **about, "files": files}, indent=1) + "\n")


def publish(built: Path, folder: Path, work: Path) -> None:
    """Put the finished folder in its place by rename; an older one moves into the work folder, which is removed."""
    if folder.exists():
        folder.rename(work / "old")
    os.replace(built, folder)


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A work folder beside the final one, removed at the end; those of killed processes are removed first."""
    for stale in folder.parent.glob(f".{folder.name}.*.part"):  # nobody works in them: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def lock(folder: Path, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Hold the lock of `folder`; enter `waiting()` while another process has it. It dies with its process."""
    from filelock import FileLock, Timeout  # comes with torch and huggingface_hub

    folder.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        with waiting():
            held.acquire()
    try:
        yield
    finally:
        held.release()
