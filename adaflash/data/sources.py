"""Where prompts come from. A source is named by `class_path` in YAML; a new kind of data is one subclass."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from adaflash.data.columns import remap
from adaflash.data.lines import LineFile, find_files
from adaflash.data.report import DataError, DropReport, RowError
from adaflash.data.rows import Row, count_answers, parse_row

Record = tuple[int, str, Any]  # address, where (file:line), and the record or the RowError that it gave


class PromptSource(ABC):
    """Rows with random access and one domain label.

    Subclasses give `_records` (one pass over everything) and `_record` (one record by its address). Bad rows are
    dropped and counted by `open`; afterwards `len(source)` rows are left, `source.row(i)` each.
    """

    def __init__(
        self, domain: str = "", weight: float = 1.0, limit: int | None = None, responses: bool = False
    ) -> None:
        """Settings all sources share.

        Args:
            domain: label of this traffic; empty: the row's own `domain`, else "default".
            weight: share of this source among the samples of training, whatever its size.
            limit: at most so many good rows, from the top.
            responses: rows carry recorded text answers to be trained on (one row per answer).
        """
        if weight <= 0:
            raise ValueError(f"weight must be above 0, got {weight}; leave the source out to switch it off")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.domain, self.weight, self.limit, self.responses = domain, weight, limit, responses
        self.report: DropReport | None = None
        self._addresses = array("Q")
        self._answers = array("i")  # which recorded answer of the record, -1: the prompt alone
        self._digest = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call this source."""

    @abstractmethod
    def _records(self) -> Iterator[Record]:
        """Every record in order; also notes what `_record`, `_where` and `_content` need."""

    @abstractmethod
    def _record(self, address: int) -> Any:
        """The record at an address."""

    @abstractmethod
    def _where(self, address: int) -> str:
        """file:line of an address."""

    @abstractmethod
    def _content(self) -> str:
        """Changes when the data changes."""

    def open(self) -> DropReport:
        """Read everything once, keep what is usable. A second call changes nothing."""
        if self.report is None:
            self.report = DropReport(self.name)
            for address, where, record in self._records():
                if self.limit is not None and len(self) >= self.limit:
                    break
                self._take(address, where, record, self.report)
            self.report.kept = len(self)
            self._digest = self._content()
        return self.report

    def drop(self, bad: dict[int, RowError]) -> None:
        """Take out rows that turned out bad later (index -> why)."""
        assert self.report is not None
        for index, error in bad.items():
            self.report.drop(self.where(index), error)
        keep = [index for index in range(len(self)) if index not in bad]
        self._addresses = array("Q", (self._addresses[index] for index in keep))
        self._answers = array("i", (self._answers[index] for index in keep))
        self.report.kept = len(self)

    def __len__(self) -> int:
        return len(self._addresses)

    def row(self, index: int) -> Row:
        """The i-th good row."""
        address = self._addresses[index]
        return self._parse(self._record(address), self._where(address), self._answers[index])

    def where(self, index: int) -> str:
        """file:line of the i-th good row."""
        return self._where(self._addresses[index])

    def fingerprint(self) -> str:
        """Changes when the rows, their number or the domain change; weight is left to the stream."""
        parts = (type(self).__name__, self.domain, self._digest, str(len(self)), str(self.responses))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    def _take(self, address: int, where: str, record: Any, report: DropReport) -> None:
        try:
            if isinstance(record, RowError):
                raise record
            answers = range(count_answers(record)) if self.responses else (-1,)
            for answer in answers:
                self._parse(record, where, answer)
        except RowError as error:
            report.drop(where, error)
            return
        for answer in answers:
            self._addresses.append(address)
            self._answers.append(answer)

    def _parse(self, record: Any, where: str, answer: int) -> Row:
        number = f"#{answer}" if answer > 0 else ""
        row = parse_row(record, Path(where).name, self.domain, answer)
        return Row(**{**row.__dict__, "id": row.id + number}) if number else row


class JsonlSource(PromptSource):
    """JSON lines, plain or gzip, one or many files; `rows.py` lists the shapes a row may have."""

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
        """Read JSON lines.

        Args:
            path: a file, a glob (`logs/**/*.jsonl.gz`), or a list of them.
            domain: label of this traffic; empty: the row's own `domain`, else "default".
            weight: share of this source among the samples of training, whatever its size.
            limit: at most so many good rows, from the top.
            responses: rows carry recorded text answers to be trained on (one row per answer).
            columns: our name -> the data's name, e.g. `{prompt: question, id: task_id}`.
            template: text of the user turn made from the row, e.g. `"{question} Reason step by step."`.
        """
        super().__init__(domain, weight, limit, responses)
        self.paths = [path] if isinstance(path, str) else list(path)
        self.columns, self.template = columns, template
        self._files: list[LineFile] = []
        self._firsts: list[int] = []  # address of the first line of each file

    @property
    def name(self) -> str:
        """The paths as given."""
        return ", ".join(self.paths)

    def _records(self) -> Iterator[Record]:
        address = 0
        for path in find_files(self.paths, "path"):
            file = LineFile(path)
            self._files.append(file)
            self._firsts.append(address)
            for slot, line in enumerate(file.scan()):
                yield address, file.where(slot), self._decode(line)
                address += 1

    def _decode(self, line: bytes) -> Any:
        try:
            return remap(json.loads(line.decode("utf-8")), self.columns, self.template)
        except UnicodeDecodeError as error:
            return RowError("not UTF-8", str(error))
        except (ValueError, RecursionError) as error:
            return error if isinstance(error, RowError) else RowError("broken JSON", str(error))

    def _locate(self, address: int) -> tuple[LineFile, int]:
        number = max(i for i, first in enumerate(self._firsts) if first <= address)
        return self._files[number], address - self._firsts[number]

    def _record(self, address: int) -> Any:
        file, slot = self._locate(address)
        record = self._decode(file.read(slot))
        if isinstance(record, RowError):
            raise DataError(f"{file.where(slot)} changed while it was being used: {record}")
        return record

    def _where(self, address: int) -> str:
        file, slot = self._locate(address)
        return file.where(slot)

    def _content(self) -> str:
        return " ".join(file.digest.hexdigest() for file in self._files)


class ShippedSource(JsonlSource):
    """The prompts that come with the package: domains math, code and chat, split train and eval."""

    def __init__(self, domain: str, split: str = "train", weight: float = 1.0, limit: int | None = None) -> None:
        """Name one of the shipped sets.

        Args:
            domain: "math", "code" or "chat".
            split: "train" or "eval".
            weight: share of this source among the samples of training.
            limit: at most so many rows, from the top.
        """
        path = files("adaflash.data") / "shipped" / split / f"{domain}.jsonl"
        if not path.is_file():
            raise DataError(
                f"no shipped prompts {split}/{domain}: split is train or eval, domain is math, code or chat"
            )
        super().__init__(str(path), domain, weight, limit)

    @property
    def name(self) -> str:
        """Short: the same on every machine."""
        return "shipped " + "/".join(Path(self.paths[0]).parts[-2:])
