"""Decoding under sharding. Ranks decode for different numbers of rounds, and a sharded forward is a collective: a plain
loop would wait for ever. Two ways that cannot:

- *gathered*: bring the weights together once, decode without a collective, let them go.
- *lockstep*: for a target too large for that. Before each pass of the target all ranks ask whether any of them reads;
  one that is through reads a dummy token for as long as others do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule

from adaflash.parallel.trained import whole
from adaflash.targets.hf import HFTarget
from adaflash.targets.ranks import Ranks
from adaflash.types import Segments


def sharded_parts(*modules: nn.Module) -> list[FSDPModule]:
    """What FSDP2 gathers at once, in the order of the modules: the same on all ranks."""
    return [part for part in chain.from_iterable(m.modules() for m in modules) if isinstance(part, FSDPModule)]


@contextmanager
def gathered(parts: Iterable[FSDPModule], stay: bool = True) -> Iterator[None]:
    """Inside, no forward of these parts is a collective. One all-gather a part on entry, none on the way out.

    stay: whether the parts keep their weights after a forward outside this context, as they are set up.
    """
    parts = list(parts)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(not stay, recurse=False)


class Gathered(Ranks):
    """Decode with weights brought together for that time.

    Args:
        drafter: Sharded or not.
        small: Length policy and what else is spread as DTensors.
        target: The target too, if it is sharded.
    """

    def __init__(self, drafter: nn.Module, small: list[nn.Module], target: HFTarget | None = None) -> None:
        self._drafter, self._small = sharded_parts(drafter), small
        self._target = sharded_parts(target.model) if target is not None else []
        self._depth = 0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Enter once for everything between two agreements: entering again inside costs nothing."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
            else:
                with torch.no_grad(), gathered(self._drafter), gathered(self._target, stay=False), whole(*self._small):
                    yield
        finally:
            self._depth -= 1

    def describe(self) -> str:
        return "sharded; rollouts gather it once" if self._target else super().describe()


class Lockstep(Gathered):
    """Decode pass by pass with the other ranks of the target's mesh; drafter and policy are gathered.

    Args:
        drafter: Sharded or not.
        small: Length policy and what else is spread as DTensors.
        target: The sharded target.
        group: The ranks that share it.
    """

    def __init__(self, drafter: nn.Module, small: list[nn.Module], target: HFTarget, group: ProcessGroup) -> None:
        super().__init__(drafter, small)
        self.target, self.group = target, group

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """A rank that is through keeps the others company; one that raises does not."""
        with super().decoding():
            try:
                yield
            except GeneratorExit:  # a stream that nobody reads to its end
                self._keep_company()
                raise
            self._keep_company()

    def before_pass(self) -> None:
        """Tell the others that this rank reads."""
        if not self._depth:
            raise RuntimeError("a target in lockstep is read inside `with target.ranks.decoding()`, on every rank")
        self._any_reads(True)

    def _keep_company(self) -> None:
        if self._depth > 1:
            return
        token = torch.zeros(1, dtype=torch.int64, device=self.target.device)
        while self._any_reads(False):
            self.target.run(token, Segments.whole([1]))

    def _any_reads(self, mine: bool) -> bool:
        flag = torch.tensor(int(mine), device=self.target.device)
        torch.distributed.all_reduce(flag, ReduceOp.MAX, group=self.group)
        return bool(flag)

    def describe(self) -> str:
        return "sharded; rollouts go pass by pass on all ranks (lockstep)"
