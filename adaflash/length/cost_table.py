"""What rounds cost on one machine, measured once: the only source of seconds for decisions. `adaflash cost` makes it.

T(n, R, context): the target reads n tokens of R requests and turns them into logits, and the n - R candidates among them
into logits once more (the drafter's own rows). D(R, context): the drafter ingests and drafts R blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaflash.errors import UserError

if TYPE_CHECKING:
    from adaflash.drafters.base import Drafter
    from adaflash.targets.hf import HFTarget

FORMAT = 1
GRAIN = 32  # contexts are rounded down to this many tokens: one curve serves many rounds
COMMAND = "adaflash cost --checkpoint RUN (or --target NAME with the drafter's sizes)"


@dataclass(frozen=True)
class CostTable:
    """Seconds on a grid; monotone and piecewise linear between its points, and beyond the largest load and context."""

    contexts: tuple[int, ...]  # tokens a request has in the cache
    loads: tuple[int, ...]  # requests R
    widths: tuple[int, ...]  # tokens a request sends, the anchor among them: 1 .. block_size
    verify: list[list[list[float]]]  # [context][load][width] T, seconds
    draft: list[list[float]]  # [context][load] D, seconds
    fingerprint: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)  # medians, load of the machine, when: for people
    _curves: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, rows: int, load: int, context: int) -> float:
        """T(n, R, context) for n = rows."""
        width = rows / load
        curves = [[_line(self.widths, row, width) for row in at] for at in self.verify]
        return self._between(curves, load, context)

    def draft_seconds(self, load: int, context: int) -> float:
        """D(R, context)."""
        return self._between(self.draft, load, context)

    def curve(self, load: int, context: int) -> Tensor:
        """T(R + m), m = 0 .. R * K candidates, float64 on the CPU."""
        key = (load, context // GRAIN)
        if key not in self._curves:
            count = load * (self.widths[-1] - 1)
            at = key[1] * GRAIN
            values = [self.seconds(load + m, load, at) for m in range(count + 1)]
            self._curves[key] = torch.tensor(values, dtype=torch.float64)
        return self._curves[key]

    def break_even(self, length: int, load: int, context: int) -> float:
        """Tau at which rounds that send `length` candidates are as fast as plain steps."""
        round_ = self.draft_seconds(load, context) + self.seconds(load * (1 + length), load, context)
        return round_ / self.seconds(load, load, context)

    @cached_property
    def digest(self) -> int:
        """48 bits that change with any number of the table."""
        text = json.dumps([self.contexts, self.loads, self.widths, self.verify, self.draft, self.fingerprint])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all."""
        content = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"format": FORMAT, **content}, indent=1) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a table. Raises UserError: no such file, or not a table of this version."""
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            assert content.pop("format") == FORMAT
            return cls(**content | {name: tuple(content[name]) for name in ("contexts", "loads", "widths")})
        except FileNotFoundError:
            raise UserError(f"no cost table at {path}. Measure one: {COMMAND}") from None
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            raise UserError(f"{path} is not a cost table of this version. Measure it again: {COMMAND}") from None

    def _between(self, values: list[list[float]], load: int, context: int) -> float:
        """[context][load] values at a load and a context; below the smallest context its own."""
        at = [_line(self.loads, row, load) for row in values]
        return _line(self.contexts, at, max(context, self.contexts[0]))


def _line(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear, going on with the last slope (never falling) beyond the ends."""
    if len(places) == 1:
        return values[0]
    i = min(max(bisect_right(places, at) - 1, 0), len(places) - 2)
    slope = (values[i + 1] - values[i]) / (places[i + 1] - places[i])
    outside = at < places[0] or at > places[-1]
    return values[i] + (max(slope, 0.0) if outside else slope) * (at - places[i])


def rising(values: Sequence[float]) -> list[float]:
    """The nearest rising sequence in squares (pool adjacent violators): a wider pass never takes less time."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [value for value, count in blocks for _ in range(count)]


def fingerprint(target: HFTarget, drafter: Drafter) -> dict[str, Any]:
    """What the numbers depend on: machine, sizes of both models; and versions, which only make a table stale."""
    text, device = target.config, target.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "machine": where,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "target": [text.model_type, target.num_layers, target.hidden_size, target.embedding_rows, str(target.dtype)],
        "drafter": [
            type(drafter).__name__,
            drafter.block_size,
            list(drafter.context_layers),
            sum(p.numel() for p in drafter.parameters()),
            str(next(drafter.parameters()).dtype),
            *([len(said.tokens)] if (said := drafter.said) else []),
        ],
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def place(of: dict[str, Any]) -> Path:
    """Where the table of a fingerprint is kept: in the cache, beside the fetched targets, by machine and models."""
    identity = json.dumps({name: value for name, value in of.items() if name != "versions"}, sort_keys=True)
    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("ADAFLASH_CACHE") or Path.home() / ".cache" / "adaflash")
    return cache.expanduser().absolute() / "costs" / f"{name}.json"


def find(target: HFTarget, drafter: Drafter, path: str = "") -> tuple[CostTable, str]:
    """The table for a pair, and what makes it stale (or nothing).

    Raises:
        UserError: there is none, or the file named is one of another block size; names the command that measures one.
    """
    mine = fingerprint(target, drafter)
    file = Path(path) if path else place(mine)
    if not path and not file.is_file():
        raise UserError(
            f"no cost table for this target, drafter and machine ({mine['machine']}, {mine['threads']} threads); a policy "
            f"that knows cost needs one. Measure it: {COMMAND}"
        )
    table = CostTable.load(file)
    if table.widths[-1] != drafter.block_size:
        raise UserError(
            f"{file} is for blocks of {table.widths[-1]}, the drafter's are {drafter.block_size}: {COMMAND}"
        )
    other = [name for name, value in mine.items() if table.fingerprint.get(name) != value]
    told = [f"{name} was {table.fingerprint.get(name)}, is {mine[name]}" for name in other]
    return table, f"the cost table {file} is stale: {'; '.join(told)}. Measure it again: {COMMAND}" if told else ""


def _processor() -> str:
    """The model of the CPU and how many cores there are."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name} x {os.cpu_count()}"
