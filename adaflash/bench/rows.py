"""`bench.jsonl`: one row a cell, appended whole, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaflash.errors import UserError

FILE = "bench.jsonl"
FORMAT = 1
Row = dict[str, Any]


class Rows:
    """The rows of a file. A row that a kill cut short is left out, and measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Row]:
        """Every whole row of this version, oldest first."""
        return list(self._read()) if self.path.is_file() else []

    def done(self, key: Row) -> Row | None:
        """The newest row of a cell; None: not measured yet."""
        return next((row for row in reversed(self.read()) if row.get("key") == key), None)

    def append(self, row: Row) -> None:
        """Write one row and make sure that it is on the disk."""
        text = json.dumps({"format": FORMAT, **row}, allow_nan=False) + "\n"
        ended = not self.path.is_file() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text if ended else f"\n{text}")
            file.flush()
            os.fsync(file.fileno())

    def check_writable(self) -> None:
        """Before an hour of measuring, not after it."""
        if self.path.is_dir() or not os.access(self.path.absolute().parent, os.W_OK):
            raise UserError(f"--output {self.path}: it cannot be written; name a file in a folder that exists")

    def _read(self) -> Iterator[Row]:
        for line in self.path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("format") == FORMAT:
                yield row
