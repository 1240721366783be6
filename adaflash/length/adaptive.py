"""The adaptive length head of the AdaFlash paper (arXiv 2607.19223): one number a block, times a rate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy, Outcome
from adaflash.types import Proposal

BOTTLENECK = 256


class ThresholdHead(nn.Module):
    """sigma = sigmoid(out(h)), h = SiLU(down f) + its residual, f = [mean over all slots; last slot].

    Parameter names are those of `thresh_head_two_model` in served checkpoints.
    """

    def __init__(self, hidden_size: int, bottleneck: int = BOTTLENECK) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, bottleneck)
        self.res = nn.ModuleList([nn.Linear(bottleneck, bottleneck)])
        self.out = nn.Linear(bottleneck, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Expected share of the block that is committed, [N] in (0, 1), from block states [N, B, H]."""
        features = torch.cat([hidden.mean(1), hidden[:, -1]], dim=-1).to(self.down.weight.dtype)
        h = F.silu(self.down(features))
        for layer in self.res:
            h = h + F.silu(layer(h))
        return self.out(h).squeeze(-1).sigmoid()


class AdaptiveLength(LengthPolicy):
    """Verify window = clamp(round(sigma * block_size * rate), minimum, block_size) tokens, the anchor among them.

    Args:
        rate: How far past the expected acceptance to go; the paper's 1.3.
        minimum: Smallest window, in tokens with the anchor; 1 means plain decoding of that request in this round.
        checkpoint: Go on from the length head of this drafter (a folder or Hub id; see `DFlash.checkpoint`).
    """

    def __init__(self, rate: float = 1.3, minimum: int = 1, checkpoint: str = "") -> None:
        super().__init__()
        if rate <= 0 or minimum < 1:
            raise UserError(f"AdaptiveLength: rate {rate} must be > 0 and minimum {minimum} at least 1")
        self.rate, self.minimum, self.checkpoint = rate, minimum, checkpoint
        self.block_size = 0

    def build(self, hidden_size: int, block_size: int) -> None:
        if self.block_size:
            return
        if self.minimum > block_size:
            raise UserError(f"AdaptiveLength: minimum {self.minimum} is longer than the block of {block_size}")
        self.block_size = block_size
        self.head = ThresholdHead(hidden_size)
        if self.checkpoint:
            self._load()

    def _load(self) -> None:
        from adaflash.export.importer import read_head  # late: the exporter knows policies

        try:
            self.load_state_dict(read_head(self.checkpoint))
        except RuntimeError as error:
            raise UserError(
                f"model.length.init_args.checkpoint: the head of {self.checkpoint} does not fit: {error}"
            ) from error

    def choose(self, proposal: Proposal) -> Tensor:
        expected = self.head(proposal.hidden) * self.block_size
        window = (expected * self.rate).round().long().clamp(self.minimum, self.block_size)
        return torch.minimum(window - 1, proposal.limits)

    def forecast(self, proposal: Proposal) -> Tensor:
        """The head expects sigma * block_size committed tokens, one of which is the target's own."""
        accepted = self.head(proposal.hidden)[:, None] * self.block_size - 1
        return F.pad(accepted, (0, self.block_size - 1), value=float("nan"))

    def loss(self, outcome: Outcome) -> Tensor:
        """Squared error of sigma against (A + 1) / block_size, summed over labelled blocks."""
        return scalar_loss(self.head, outcome)

    def describe(self) -> str:
        return f"AdaptiveLength(rate={self.rate}, minimum={self.minimum})"


def scalar_loss(head: ThresholdHead, outcome: Outcome) -> Tensor:
    """The paper's loss: squared error of sigma against (A + 1) / block_size, summed over labelled blocks."""
    error = head(outcome.hidden) - (outcome.accepted + 1) / outcome.hidden.shape[1]
    return (error.square() * outcome.labelled).sum()
