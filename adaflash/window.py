"""Exact normalisation over an optimizer window: all its micro-batches, on all ranks, have one denominator.

Each micro-batch backpropagates a plain sum. Before clipping, the sums of weights and of labelled blocks are all-reduced
once and the gradients divided by them, so that 4 micro-batches are 1 batch and 2 ranks are 1 rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Window:
    """Sums of one optimizer window."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's detached sums (numerators and denominators alike)."""
        for name, value in sums.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def close(self) -> dict[str, Tensor]:
        """The sums over all micro-batches and ranks; starts the next window. One collective, in sorted order of names."""
        names = sorted(self._sums)
        if not names:
            return {}
        flat = torch.cat([self._sums[name].reshape(-1) for name in names])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(flat)
        parts = flat.split([self._sums[name].numel() for name in names])
        shapes = [self._sums[name].shape for name in names]
        self._sums = {}
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}


def divide_gradients(parameters: Iterable[nn.Parameter], by: float) -> None:
    """Divide in place; a denominator of 0 means nothing was summed, so the gradients are 0 already."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and by > 0:
        torch._foreach_div_(gradients, by)


def mean_gradients(parameters: list[nn.Parameter], by: float, limit: float, update: int, owner: str) -> Tensor:
    """Summed gradients divided by their denominator and clipped to a norm of `limit`, in place; the norm before clipping.

    They are the same on every rank by now, so that all ranks stop together.

    Raises:
        FloatingPointError: the norm is not finite; no weight and no moment has been touched.
    """
    divide_gradients(parameters, by)
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # of shards
    if not bool(norm.isfinite()):
        raise FloatingPointError(
            f"update {update}: the gradient of the {owner} is not finite (norm {float(norm)}); weights and optimizer are "
            "unchanged. Go on from the last checkpoint with a lower learning rate, or look at the data"
        )
    return norm


def averages(sums: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """For the log: terms as means over weights, norms from their squares, pairs (numerator, denominator) as ratios."""
    norms = {
        name: value.sqrt() / weight for name, value in sums.items() if name.startswith("grad_norm/") and weight > 0
    }
    terms = {name: value / weight for name, value in sums.items() if name.startswith("loss/") and weight > 0}
    ratios = {name: value[0] / value[1] for name, value in sums.items() if value.shape == (2,) and value[1] > 0}
    return {**terms, **norms, **ratios}
