"""Gradients that are known before `backward` is called, handed to autograd as if it had found them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adaflash.losses.base import LossTerm
from adaflash.losses.rows import slots


def trainable(terms: Sequence[LossTerm]) -> list[nn.Parameter]:
    """Parameters of the terms that learn."""
    return [parameter for term in terms for parameter in term.parameters() if parameter.requires_grad]


class Attach(torch.autograd.Function):
    """A loss whose gradients are known already: hands them on, times what comes from above.

    apply(loss, n, *inputs[n], *gradients[n]) -> loss.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """The loss itself; the gradients wait for `backward`."""
        ctx.save_for_backward(*tensors[count:])
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """upstream * gradient for every input."""
        gradients = ctx.saved_tensors
        return None, None, *(upstream.to(grad.dtype) * grad for grad in gradients), *(None for _ in gradients)


def attach(loss: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor], index: Tensor) -> Tensor:
    """The loss as a scalar that passes the gradients on: rows [M, H] to the states [N, B, H], others as they are.

    Args:
        loss: its value.
        inputs: states and the terms' parameters; empty where nothing is to learn.
        gradients: one of each input.
        index: [M] candidate of each row, n * K + k - 1.
    """
    if not inputs:
        return loss.float()
    states = inputs[0]
    spread = torch.zeros_like(states)
    spread.view(-1, states.shape[-1])[slots(index, states.shape[1] - 1)] = gradients[0]
    loss = loss.to(states.dtype if states.dtype == torch.float64 else torch.float32)
    attached: Tensor = Attach.apply(loss, len(inputs), *inputs, spread, *gradients[1:])
    return attached
