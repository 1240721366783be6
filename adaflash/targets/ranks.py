"""What several ranks agree on while they decode with one target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Ranks:
    """Nothing: every weight is whole on this rank, which may decode whenever and as long as it likes."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Hold what decoding needs. Every rank enters equally often; inside each decodes as much as it likes."""
        yield

    def before_pass(self) -> None:
        """The target is about to read."""

    def describe(self) -> str:
        """One phrase for the banner."""
        return "a whole copy on every device"
