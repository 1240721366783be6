"""What every prompt source is: rows with random access, bad ones dropped and counted when it is opened."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from typing import Any

from adaflash.data.report import DropReport, RowError
from adaflash.data.rows import Row, count_answers, parse_row
from adaflash.errors import UserError

Record = tuple[int, str, Any]  # address, where (file:line), and the record or the RowError that it gave


class PromptSource(ABC):
    """Rows of one kind of traffic. Subclasses give the abstract methods; `open` keeps what is usable.

    Args:
        domain: Label of this traffic; empty: the row's own `domain`, else "default".
        weight: Share of this source among the samples of training, whatever its size.
        limit: At most so many good rows, from the top; null: all.
        responses: Rows must carry recorded answers, which are trained on: one row per answer of a conversation.
    """

    def __init__(
        self, domain: str = "", weight: float = 1.0, limit: int | None = None, responses: bool = False
    ) -> None:
        if weight <= 0:
            raise UserError(f"weight of a data source must be above 0, got {weight:g}; to switch it off, leave it out")
        if limit is not None and limit < 1:
            raise UserError(f"limit of a data source must be at least 1 (or null for all), got {limit}")
        self.domain, self.weight, self.limit, self.responses = domain, weight, limit, responses
        self.domains: set[str] = set()  # of the rows, known once the source is open
        self.report: DropReport | None = None
        self._addresses = array("Q")
        self._answers = array("i")  # which recorded answer of the record; -1: the prompt alone
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
        """A digest that changes when the data changes."""

    def open(self) -> DropReport:
        """Read everything once and note where the usable rows are. A second call changes nothing."""
        if self.report is None:
            self.report = DropReport(self.name)
            for address, where, record in self._records():
                self._take(address, where, record, self.report)
                if self.limit is not None and len(self) >= self.limit:
                    break
            self.report.kept = len(self)
            self._digest = self._content()
        return self.report

    def files(self) -> list[dict[str, Any]]:
        """Files that were read: path, bytes on disk, and a hash of what was read (all of it, unless `limit` ended it)."""
        return []

    def drop(self, bad: dict[int, RowError]) -> None:
        """Take out rows that turned out bad later (index -> why)."""
        report = self.open()
        for index, error in bad.items():
            report.drop(self.where(index), error)
        keep = [index for index in range(len(self)) if index not in bad]
        self._addresses = array("Q", (self._addresses[index] for index in keep))
        self._answers = array("i", (self._answers[index] for index in keep))
        report.kept = len(self)

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
        """Changes when the rows, their number, the domain or the weight change."""
        parts = (
            type(self).__name__,
            self.domain,
            f"{self.weight:g}",
            str(self.responses),
            self._digest,
            str(len(self)),
        )
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    def _take(self, address: int, where: str, record: Any, report: DropReport) -> None:
        try:
            if isinstance(record, RowError):
                raise record
            answers = range(count_answers(record)) if self.responses else (-1,)
            for answer in answers:
                self.domains.add(self._parse(record, where, answer).domain)
        except RowError as error:
            report.drop(where, error)
            return
        self._addresses.extend(address for _ in answers)
        self._answers.extend(answers)
        if self.limit is not None:
            del self._addresses[self.limit :], self._answers[self.limit :]

    def _parse(self, record: Any, where: str, answer: int) -> Row:
        row = parse_row(record, where.rpartition("/")[2], self.domain, answer)
        return dataclasses.replace(row, id=f"{row.id}#{answer}") if answer > 0 else row
