"""Records of a stream, kept on the disk: a stream cannot be shuffled as a whole or taken up in its middle, a file can."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from typing import Any


class Spool:
    """Records by number, 8 bytes of memory each. The file goes with the process that wrote it."""

    def __init__(self) -> None:
        self._file: Any = tempfile.NamedTemporaryFile("w+b", prefix="adaflash-", suffix=".jsonl")  # noqa: SIM115
        self._path, self._ends = self._file.name, array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, record: Any) -> None:
        """Keep a record; what JSON has no word for is kept as text."""
        self._ends.append(self._ends[-1] + self._file.write(json.dumps(record, default=str).encode()))

    def read(self, number: int) -> Any:
        """A record. Safe in forked and in spawned workers: no shared file position is used."""
        self._flush()
        start, end = self._ends[number], self._ends[number + 1]
        with open(self._path, "rb") as file:
            return json.loads(os.pread(file.fileno(), end - start, start))

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads the file, it does not own it."""
        self._flush()
        return {**self.__dict__, "_file": None}

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
