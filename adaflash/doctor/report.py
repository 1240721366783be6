"""One line per check: what was found, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from adaflash.errors import UserError

Status = Literal["ok", "note", "warn", "fail"]
EXIT: dict[Status, int] = {"ok": 0, "note": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def line(self) -> str:
        """`STATUS name  found -> remedy`, on one line."""
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return " ".join(f"{self.status:<4}  {self.name:<15} {self.found}{remedy}".split("\n"))


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, "ok", found)


def run_checks(groups: Sequence[tuple[str, Callable[[], Iterable[Check]]]]) -> Iterator[Check]:
    """Every check of every group; one that raises becomes a failed check and does not stop the others."""
    for name, group in groups:
        try:
            yield from group()
        except UserError as error:
            yield Check(name, "fail", str(error))
        except Exception as error:  # a check must not hide the others, whatever it meets
            yield Check(name, "fail", f"the check itself failed: {type(error).__name__}: {error}", "please report this")


def exit_status(checks: Iterable[Check]) -> int:
    """0: well, 1: acceptance may suffer, 2: broken."""
    return max((EXIT[check.status] for check in checks), default=0)


def as_json(checks: Sequence[Check]) -> dict[str, object]:
    """What --json prints."""
    return {"exit_status": exit_status(checks), "checks": [asdict(check) for check in checks]}
