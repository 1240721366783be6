"""Random access to the lines of a text file: one pass notes where lines begin, later reads are one seek each."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterator
from typing import IO

from adaflash.data.report import DataError

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"


def find_files(paths: list[str], key: str) -> list[str]:
    """Files named by paths and globs, in the order given (globs sorted), each once. `key` names the setting."""
    found: dict[str, None] = {}
    for path in paths:
        pattern = os.path.expanduser(path)
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise DataError(f"{key}: no file matches {path!r} (looked from {os.getcwd()})")
        folders = [match for match in matches if os.path.isdir(match)]
        if folders:
            raise DataError(f"{key}: {folders[0]!r} is a folder; name its files, e.g. {folders[0].rstrip('/')}/*.jsonl")
        found.update(dict.fromkeys(matches))
    return list(found)


class LineFile:
    """The non-blank lines of one file, plain or gzip, 24 bytes of memory each.

    Lines end at a newline only: U+2028 and friends are legal inside JSON strings. A gzip file is unpacked once into an
    unnamed temporary file, because gzip has no random access.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.numbers = array("Q")  # line number in the file, from 1, blank lines counted
        self.digest = hashlib.blake2b(digest_size=8)
        self._starts = array("Q")
        self._sizes = array("Q")
        self._unpacked: IO[bytes] | None = None

    def scan(self) -> Iterator[bytes]:
        """Every non-blank line, noting its place."""
        offset = 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                start, offset = offset, offset + len(line)
                self.digest.update(line)
                if number == 1 and line.startswith(BOM):
                    line, start = line[len(BOM) :], start + len(BOM)
                if line.strip():
                    self._starts.append(start)
                    self._sizes.append(len(line))
                    self.numbers.append(number)
                    yield line

    def read(self, slot: int) -> bytes:
        """Line number `slot` of the non-blank ones. Safe in forked workers: no shared file position is used."""
        if self._unpacked is None and not self._is_gzip():
            with open(self.path, "rb") as file:
                return os.pread(file.fileno(), self._sizes[slot], self._starts[slot])
        return os.pread(self._unpack().fileno(), self._sizes[slot], self._starts[slot])

    def where(self, slot: int) -> str:
        """file:line of a slot."""
        return f"{self.path}:{self.numbers[slot]}"

    def __getstate__(self) -> dict[str, object]:
        """An open file does not travel to another process, and neither does a hash: workers need only the places."""
        return {**self.__dict__, "_unpacked": None, "digest": None}

    def _open(self) -> IO[bytes]:
        if not self._is_gzip():
            return open(self.path, "rb")
        unpacked = self._unpack()
        unpacked.seek(0)
        return os.fdopen(os.dup(unpacked.fileno()), "rb")

    def _is_gzip(self) -> bool:
        with open(self.path, "rb") as file:
            return file.read(2) == GZIP

    def _unpack(self) -> IO[bytes]:
        if self._unpacked is None:
            unpacked = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as this object)
            try:
                with gzip.open(self.path, "rb") as packed:
                    while chunk := packed.read(1 << 20):
                        unpacked.write(chunk)
            except (EOFError, OSError) as error:
                raise DataError(f"{self.path}: the gzip file is damaged or cut off ({error}); copy it again") from error
            unpacked.flush()
            self._unpacked = unpacked
        return self._unpacked
