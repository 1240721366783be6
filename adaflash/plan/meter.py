"""Memory without memory: the run's own code on tensors that have a size and a place, but no storage.

What is counted here is what the code really allocates, temporaries too, so that no formula can fall behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors are made without storage; real ones (indices) may be mixed with them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Meter(TorchDispatchMode):
    """Bytes of the storages that operations make while the meter is on: alive now, and at most.

    Tensors that were there before are not counted. Works on real tensors as on fake ones; a kernel's own scratch
    memory is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # storage -> its bytes, 0 for one that was there before

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what goes in and comes out."""
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, made=False)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            self._see(tensor, made=True)
        return result

    def reset_peak(self) -> None:
        """Count the largest from here on."""
        self.peak = self.now

    def _see(self, tensor: Any, made: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:  # repacked weights have no storage
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if made else 0
        self.now += self._known[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


def nbytes(tensors: Any) -> int:
    """Bytes of the tensors in any nest of lists and mappings, each storage once."""
    storages = {id(t): t for t in tree_leaves(tensors) if isinstance(t, Tensor)}
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in storages.values()}.values())


def autocast(precision: str) -> torch.autocast:
    """The context in which Lightning runs the steps under a precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def grown(play: Callable[[int], int], count: int) -> int:
    """What `count` requests take, when each takes what every other does: few are played, more go on along that line."""
    few, some = 2, 4
    if count <= some:
        return play(count)
    low, high = play(few), play(some)
    return low + (high - low) * (count - few) // (some - few)
