"""The objective with every logit of a batch at once: slow, plain, differentiated by autograd. The tests believe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from adaflash.losses.base import LossTerm


def plain_loss(
    hidden: Tensor,
    token: Tensor,
    weight: Tensor,
    teacher: Tensor | None,
    terms: Sequence[LossTerm],
    head: Callable[[Tensor], Tensor],
    drafted: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """sum_i w_i sum_terms weight * term_i, a scalar differentiable with respect to `hidden`.

    Args:
        hidden: [N, B, H] drafter states; slot 0 is left out.
        token: [N, K] data tokens.
        weight: [N, K] position weights, 0 where not supervised.
        teacher: [N, K, H] states of the target that teach each candidate (anything where the weight is 0), or None.
        terms: what is summed.
        head: states [M, H] -> logits [M, V].
        drafted: the same for the drafter, -inf where it can say nothing, if its head is not the target's.
    """
    student = (drafted or head)(hidden[:, 1:].flatten(0, 1))
    taught = None if teacher is None else head(teacher.detach().flatten(0, 1)).detach()
    flat = weight.flatten()
    for term in terms:
        term.begin(float(flat.double().sum()))
    total = hidden.new_zeros(())
    for term in terms:
        total = total + term.weight * (flat * term(student, taught, token.flatten())).sum()
    return total
