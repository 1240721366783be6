"""How busy the machine was with other things while something was measured."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CONTENDED = 0.1  # cores' share that others used from which speeds are not to be trusted


@dataclass(frozen=True)
class Watched:
    """One stretch of time on this machine."""

    load_before: float  # load average of the last minute when it began
    load_after: float
    cpu_share: float  # processor seconds of this process over what all its threads could have used
    others: float | None  # share of the machine's cores that other processes used; None: the system does not tell
    threads: int
    cores: int

    @property
    def contended(self) -> bool:
        """Others took so much of the machine that speeds are theirs as much as ours."""
        return self.others is not None and self.others > CONTENDED

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "contended": self.contended}


class Watch:
    """Begins to look when it is made."""

    def __init__(self) -> None:
        self._load, self._at = os.getloadavg()[0], _now()

    def seen(self) -> Watched:
        """What happened since."""
        wall, own, busy = (now - then for now, then in zip(_now(), self._at, strict=True))
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        others = max(busy - own, 0.0) / (wall * cores) if self._at[2] > 0 and wall > 0 else None
        share = own / (wall * min(threads, cores)) if wall > 0 else 0.0
        return Watched(self._load, os.getloadavg()[0], share, others, threads, cores)


def _now() -> tuple[float, float, float]:
    """Wall, processor seconds of this process, and busy seconds of all cores since boot (0: not told)."""
    return time.monotonic(), time.process_time(), _busy()


def _busy() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
