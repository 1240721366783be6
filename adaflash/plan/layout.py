"""How a run is spread over devices: who holds a whole copy of what, and who a part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adaflash.errors import UserError
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.strategy import check_strategy


@dataclass(frozen=True)
class Layout:
    """Devices, and into how many parts drafter and target are cut."""

    devices: int = 1  # a node
    nodes: int = 1
    strategy: str = "single"
    drafter_parts: int = 1
    target_parts: int = 1
    gathers_target: bool = True  # a sharded target is whole while it decodes (else layer by layer)

    @property
    def ranks(self) -> int:
        """Processes, one a device."""
        return self.devices * self.nodes

    @property
    def copies_gradients(self) -> bool:
        """DDP keeps the gradients a second time, in the buckets that it reduces."""
        return self.ranks > 1 and self.drafter_parts == 1


def share(tensors: Iterable[Tensor], parts: int) -> int:
    """Bytes that the rank with the most holds: each tensor is cut along its rows, the first parts are the longest."""
    return sum(_rows(tensor, parts) * (tensor.nbytes // max(_length(tensor), 1)) for tensor in tensors)


def _length(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _rows(tensor: Tensor, parts: int) -> int:
    return -(-_length(tensor) // parts)


def layout_of(trainer: Any, options: ParallelOptions, weights: int, memory: int, devices: int, nodes: int) -> Layout:
    """From the trainer's section of the configuration; numbers given on the command line come before it.

    Args:
        trainer: That section.
        options: Where the target lies; where that is `auto`, memory decides as it does when a run begins.
        weights: Bytes of the target.
        memory: Bytes of a device; 0: not known, so that a copy is taken to fit.
        devices: Of a node; 0: what the trainer says.
        nodes: 0: what the trainer says.

    Raises:
        UserError: the number of devices is left to the machine that will run it, or the strategy is not offered.
    """
    nodes = nodes or int(trainer.num_nodes)
    devices = devices or _count(trainer)
    check_strategy(trainer.strategy)
    name, ranks, room = _name(trainer.strategy), devices * nodes, memory or weights * 10**3
    if ranks == 1:
        return Layout()
    parts = {"replicate": 1, "node": devices, "world": ranks}[options.place(weights, room, devices, nodes)]
    return Layout(
        devices, nodes, name, ranks if name == "fsdp2" else 1, parts, options.mode(weights, room) == "gathered"
    )


def _count(trainer: Any) -> int:
    """How many devices of a node `trainer.devices` names."""
    devices = trainer.devices
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([each for each in devices.split(",") if each.strip()])
    if str(devices).isdigit():
        return max(int(devices), 1)
    if trainer.accelerator == "cpu":
        return 1
    raise UserError(f"trainer.devices is {devices!r}: say how many a node has, with --devices N (or trainer.devices)")


def _name(strategy: Any) -> str:
    """Name of a strategy that is given as a word or as a class."""
    given = strategy if isinstance(strategy, str) else getattr(strategy, "strategy_name", type(strategy).__name__)
    return str(given).lower()
