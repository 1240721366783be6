"""What was dropped from the data, why and where: counted reasons and the first few places."""

from __future__ import annotations

from collections import Counter

from adaflash.errors import UserError

PLACES = 8  # how many places a report names; the counts cover all of them


class DataError(UserError):
    """The data as a whole cannot be used; the message says what, where and how to mend it."""


class RowError(ValueError):
    """One row cannot be used: `reason` is what is counted, `detail` is what was found in this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        """Data loader workers send their errors through pickle."""
        detail = str(self)[len(self.reason) + 2 : -1]
        return type(self), (self.reason, detail)


class DropReport:
    """Rows kept and dropped of one source."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept = 0
        self.reasons: Counter[str] = Counter()
        self.places: list[str] = []
        self.notes: list[str] = []

    @property
    def dropped(self) -> int:
        """All dropped rows."""
        return self.reasons.total()

    def drop(self, where: str, error: RowError) -> None:
        """Count one bad row found at `where` (file:line)."""
        self.reasons[error.reason] += 1
        if len(self.places) < PLACES:
            self.places.append(f"{where}: {error}")

    def check(self, max_dropped: float) -> None:
        """Raise DataError if nothing is left, or if more than the share `max_dropped` was dropped."""
        total = self.kept + self.dropped
        if self.kept == 0:
            raise DataError(f"no usable row is left in {self.name}.\n{self}")
        if self.dropped > max_dropped * total:
            raise DataError(
                f"{self.dropped} of {total} rows of {self.name} were dropped, more than data.max_dropped = "
                f"{max_dropped:g} allows. Mend the rows, or raise data.max_dropped if this is expected.\n{self}"
            )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.kept} rows kept, {self.dropped} dropped"]
        lines += [f"  {count} x {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"    {place}" for place in self.places]
        if self.dropped > len(self.places) > 0:
            lines.append(f"    ... and {self.dropped - len(self.places)} more")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])
