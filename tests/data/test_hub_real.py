"""HubSource with the real `datasets`: a folder, an address of files, streams; no network."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaflash.data.report import DataError
from adaflash.data.sources import HubSource

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside the test's folder, no progress bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set in a folder: 30 questions, two of them empty."""
    rows = [{"question": "" if i in (3, 4) else f"What is {i}?", "task": i} for i in range(30)]
    place = tmp_path / "set"
    place.mkdir()
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(place / "train.parquet"))
    return place


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_by_address_and_by_folder(folder: Path, streaming: bool, ending: str) -> None:
    """`hf://datasets/...` and `file://...` take the same way."""
    columns = {"prompt": "question", "id": "task"}
    source = HubSource(f"file://{folder}/train.{ending}", columns=columns, streaming=streaming)
    report = source.open()
    assert (report.kept, report.reasons) == (28, {"empty content": 2})
    assert [source.row(i).id for i in range(28)] == [str(i) for i in range(30) if i not in (3, 4)]
    assert source.row(27).messages[0]["content"] == "What is 29?"
    assert f"train.{ending}[train]:4: empty content" in str(report)


def test_a_stream_is_the_download(folder: Path) -> None:
    (folder / "train.parquet").unlink()
    one, other = (HubSource(str(folder), columns={"prompt": "question"}, streaming=s) for s in (False, True))
    for source in (one, other):
        source.open()
    assert [one.row(i) for i in range(28)] == [other.row(i) for i in range(28)]
    assert pickle.loads(pickle.dumps(other)).row(5) == one.row(5)  # as a spawned worker gets it


def test_a_stream_is_read_up_to_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    load = datasets.load_dataset

    def counted(*args: object, **kwargs: object) -> object:
        assert kwargs["streaming"] is True
        return (taken.append(row) or row for row in load(*args, **kwargs))

    monkeypatch.setattr(datasets, "load_dataset", counted)
    source = HubSource(f"file://{folder}/train.jsonl", columns={"prompt": "question"}, limit=5, streaming=True)
    assert source.open().kept == 5
    assert len(taken) == 7  # two of them are empty
    assert source.row(4).messages[0]["content"] == "What is 6?"


def test_a_stream_that_breaks_off_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Iterator[dict[str, str]]:
        yield from [{"prompt": "a"}] * 3
        raise OSError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(DataError, match=r"broke off after row 3 \(OSError: connection reset.*JsonlSource"):
        HubSource("acme/questions", streaming=True).open()
    monkeypatch.undo()
    with pytest.raises(DataError, match="must end in one of parquet, jsonl"):
        HubSource("hf://datasets/acme/x/data.txt").open()
