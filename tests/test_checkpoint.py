"""K9: checkpoint files are whole or the ones before are, and a bad one is refused with the name of a good one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from adaflash import checkpoint
from adaflash.checkpoint import WholeCheckpoints, read_whole, resolve, whole_checkpoints, write_whole
from adaflash.errors import UserError


def content(updates: int) -> dict[str, Any]:
    return {"adaflash": {}, "state_dict": {"x": torch.full((5000,), float(updates))}, "global_step": updates}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints: of 2, 4 and 6 updates, the last two of which are `last` and a better `best`."""
    for name, updates in (("step2", 2), ("last", 4), ("best", 6)):
        write_whole(content(updates), tmp_path / f"{name}.ckpt")
    return tmp_path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = WholeCheckpoints()
    writer.save_checkpoint(content(3), tmp_path / "new" / "a.ckpt")
    assert torch.equal(writer.load_checkpoint(tmp_path / "new" / "a.ckpt")["state_dict"]["x"], torch.full((5000,), 3.0))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("when", ["save", "fsync", "replace"])
def test_a_failure_while_writing_leaves_the_previous_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        if when == "save":
            Path(args[1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch if when == "save" else checkpoint.os, when, full)
    with pytest.raises(UserError, match=r"last\.ckpt: the checkpoint could not be written .*No space left"):
        write_whole(content(9), folder / "last.ckpt")
    monkeypatch.undo()
    assert read_whole(folder / "last.ckpt")["global_step"] == 4
    assert len(list(folder.iterdir())) == 3


BROKEN = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:9000]), "cut off, or not a checkpoint"),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "text": (lambda path: path.write_text("hello\n"), "cut off, or not a checkpoint"),
    "foreign": (lambda path: torch.save({"state_dict": {}}, path), "not written by adaflash fit"),
    "tensor": (lambda path: torch.save(torch.zeros(3), path), "not written by adaflash fit"),
    "gone": (lambda path: path.unlink(), "no such checkpoint"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_bad_one_is_refused_and_a_good_one_named(folder: Path, how: str) -> None:
    damage, says = BROKEN[how]
    damage(folder / "last.ckpt")
    for read in (read_whole, WholeCheckpoints().load_checkpoint, lambda path: resolve(str(path), folder)):
        with pytest.raises(UserError, match=rf"last.ckpt: .*{says}.* Use .*best.ckpt.*6 updates"):
            read(folder / "last.ckpt")


def test_last_is_the_whole_one_with_most_updates(folder: Path) -> None:
    assert resolve("last", folder) == str(folder / "best.ckpt")
    (folder / "best.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match="passed over .*best.ckpt: the file is empty"):
        assert resolve("last", folder) == str(folder / "last.ckpt")
    write_whole(content(4), folder / "step4.ckpt")  # as many updates, but later
    with pytest.warns(UserWarning, match="passed over"):
        assert resolve("last", folder) == str(folder / "step4.ckpt")


def test_nothing_to_go_on_from(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert resolve("last", tmp_path_factory.mktemp("empty")) == ""
    assert resolve("last", folder / "nowhere") == ""
    for path in folder.iterdir():
        path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"(?s)no checkpoint is whole, start anew.*best\.ckpt: cut off.*step2\.ckpt"):
        resolve("last", folder)
    with pytest.raises(UserError, match=r"no good checkpoint in .* either"):
        read_whole(folder / "last.ckpt")


def test_unfinished_files_are_not_found(folder: Path) -> None:
    (folder / ".last.ckpt.partial").write_bytes(b"half")
    assert whole_checkpoints(folder)[1] == []
    write_whole(content(8), folder / "last.ckpt")  # takes the place of what the kill left
    assert not (folder / ".last.ckpt.partial").exists()
    assert resolve("last", folder) == str(folder / "last.ckpt")
