"""Where prompts come from, named by `class_path` in YAML. A new kind of data is one more subclass, in any file."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from adaflash.data.base import PromptSource, Record
from adaflash.data.columns import remap
from adaflash.data.lines import LineFile, find_files
from adaflash.data.report import DataError, RowError
from adaflash.data.spool import Spool

__all__ = ["HubSource", "JsonlSource", "PromptSource", "ShippedSource"]


class JsonlSource(PromptSource):
    """JSON lines, plain or gzip, one or many files; `adaflash/data/rows.py` lists the shapes a row may have.

    Args:
        path: A file, a glob (`logs/**/*.jsonl.gz`), or a list of them; relative to the working directory.
        domain: Label of this traffic; empty: the row's own `domain`, else "default".
        weight: Share of this source among the samples of training, whatever its size.
        limit: At most so many good rows, from the top; null: all.
        responses: Rows must carry recorded answers, which are trained on: one row per answer of a conversation.
        columns: Our name -> the data's name, e.g. `{prompt: question, id: task_id}`.
        template: Text of the user turn made from the row, e.g. `"{question} Reason step by step."`.
    """

    def __init__(
        self,
        path: str | list[str],
        domain: str = "",
        weight: float = 1.0,
        limit: int | None = None,
        responses: bool = False,
        columns: dict[str, str] = {},  # noqa: B006  (read only; a union with None makes CLI errors unreadable)
        template: str = "",
    ) -> None:
        super().__init__(domain, weight, limit, responses)
        self.paths = [path] if isinstance(path, str) else list(path)
        self.columns, self.template = columns, template
        self._files: list[LineFile] = []
        self._firsts: list[int] = []  # address of the first line of each file

    @property
    def name(self) -> str:
        """The paths as given."""
        return ", ".join(self.paths)

    def files(self) -> list[dict[str, Any]]:
        """Every file; gzip is hashed unpacked."""
        return [
            {"path": file.path, "bytes": os.path.getsize(file.path), "blake2b_8": file.digest.hexdigest()}
            for file in self._files
        ]

    def _records(self) -> Iterator[Record]:
        address = 0
        for path in find_files(self.paths, "path of JsonlSource"):
            file = LineFile(path)
            self._files.append(file)
            self._firsts.append(address)
            for slot, line in enumerate(file.scan()):
                yield address, file.where(slot), self._decode(line)
                address += 1

    def _decode(self, line: bytes) -> Any:
        """The record of a line, or the RowError it gives."""
        try:
            return remap(json.loads(line.decode("utf-8")), self.columns, self.template)
        except RowError as error:
            return error
        except UnicodeDecodeError as error:
            return RowError("not UTF-8", str(error))
        except (ValueError, RecursionError) as error:
            array = line.strip() == b"[" and "; this looks like one JSON array: write one object a line instead"
            return RowError("broken JSON", f"{error}{array or ''}")

    def _locate(self, address: int) -> tuple[LineFile, int]:
        number = bisect.bisect_right(self._firsts, address) - 1
        return self._files[number], address - self._firsts[number]

    def _record(self, address: int) -> Any:
        file, slot = self._locate(address)
        record = self._decode(file.read(slot))
        if isinstance(record, RowError):
            raise DataError(f"{file.where(slot)} has changed since the run began ({record}); start again to re-read it")
        return record

    def _where(self, address: int) -> str:
        file, slot = self._locate(address)
        return file.where(slot)

    def _content(self) -> str:
        return " ".join([*(file.digest.hexdigest() for file in self._files), json.dumps(self.columns), self.template])


class ShippedSource(JsonlSource):
    """The prompts that come with the package: domains math, code and chat, split train and eval.

    Args:
        domain: "math", "code" or "chat".
        split: "train" or "eval".
        weight: Share of this source among the samples of training.
        limit: At most so many rows, from the top; null: all.
    """

    def __init__(self, domain: str, split: str = "train", weight: float = 1.0, limit: int | None = None) -> None:
        path = files("adaflash.data") / "shipped" / split / f"{domain}.jsonl"
        if not path.is_file():
            raise DataError(
                f"ShippedSource: there is no {split}/{domain}; split is train or eval, domain is math, code or chat"
            )
        super().__init__(str(path), domain, weight, limit)

    @property
    def name(self) -> str:
        """Short, and the same on every machine."""
        return "shipped " + "/".join(Path(self.paths[0]).parts[-2:])


class HubSource(PromptSource):
    """A data set of the Hugging Face Hub, or a folder that `datasets` can load. Needs the extra `data`.

    Args:
        path: Hub id (`openai/gsm8k`), local folder, or the address of files (`hf://datasets/OWNER/NAME/*.parquet`).
        name: Configuration of the data set; null: its default one.
        split: Split, also a part of one (`train[:1000]`).
        columns: Our name -> the data's name, e.g. `{messages: conversation}` or `{turns: prompt}`.
        template: Text of the user turn made from the row, e.g. `"{question} Reason step by step."`.
        domain: Label of this traffic; empty: the row's own `domain`, else "default".
        weight: Share of this source among the samples of training, whatever its size.
        limit: At most so many good rows, from the top; null: all.
        responses: Rows must carry recorded answers, which are trained on: one row per answer of a conversation.
        streaming: Read the rows one after another, up to `limit` good ones, without downloading the data set first; they
            are kept in a temporary file, so that shuffling and resuming are as exact as with a download.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        columns: dict[str, str] = {},  # noqa: B006
        template: str = "",
        domain: str = "",
        weight: float = 1.0,
        limit: int | None = None,
        responses: bool = False,
        streaming: bool = False,
    ) -> None:
        super().__init__(domain, weight, limit, responses)
        self.path, self.config, self.split, self.streaming = path, name, split, streaming
        self.columns, self.template = columns, template
        self._data: Any = None

    @property
    def name(self) -> str:
        """path/config[split]."""
        return f"{self.path}{f'/{self.config}' if self.config else ''}[{self.split}]"

    def _records(self) -> Iterator[Record]:
        if self.streaming:
            yield from self._stream()
            return
        self._data = self._load()
        for address in range(len(self._data)):
            yield address, self._where(address), self._remapped(address)

    def _stream(self) -> Iterator[Record]:
        self._data = Spool()
        for address, record in enumerate(self._reading(self._load())):
            self._data.append(record)
            yield address, self._where(address), self._renamed(record)

    def _reading(self, rows: Any) -> Iterator[Any]:
        """The rows of a stream; what breaks it is told with the row after which it broke."""
        number = 0
        try:
            for row in rows:
                yield row
                number += 1
        except Exception as error:  # network, schema, damaged file: each library layer has its own types
            raise DataError(
                f"HubSource: {self.name} broke off after row {number} ({type(error).__name__}: {error}). Rows of different "
                "shapes in one file are read by adaflash.data.sources.JsonlSource"
            ) from error

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"HubSource ({self.name}) needs the package `datasets`: install adaflash[data], or download the data "
                "and name its file with adaflash.data.sources.JsonlSource"
            ) from error
        try:
            more = {"streaming": True} if self.streaming else {}
            if "://" in self.path:
                return datasets.load_dataset(_format(self.path), data_files=self.path, split=self.split, **more)
            return datasets.load_dataset(self.path, self.config, split=self.split, **more)
        except Exception as error:  # offline, unknown name, unknown split: each library layer has its own types
            raise DataError(
                f"HubSource: cannot load {self.name} ({type(error).__name__}: {error}). Check path, name and split; "
                "without a network, name a local folder as path, or a file with adaflash.data.sources.JsonlSource"
            ) from error

    def _remapped(self, address: int) -> Any:
        return self._renamed(self._data.read(address) if self.streaming else self._data[address])

    def _renamed(self, record: Any) -> Any:
        try:
            return remap(record, self.columns, self.template)
        except RowError as error:
            return error

    def _record(self, address: int) -> Any:
        return self._remapped(address)

    def _where(self, address: int) -> str:
        return f"{self.name}:{address + 1}"

    def _content(self) -> str:
        last = len(self._data) - 1
        ends = [self._remapped(0), self._remapped(last)] if last >= 0 else []
        text = json.dumps([self.name, len(self._data), ends, self.columns, self.template], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _format(address: str) -> str:
    """Which reader of `datasets` takes files of this ending."""
    endings = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "csv", "arrow": "arrow"}
    ending = address.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    if ending not in endings:
        raise DataError(f"HubSource: {address} must end in one of {', '.join(endings)} (or one of them and .gz)")
    return endings[ending]
