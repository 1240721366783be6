"""The survival head: how likely each candidate of a block is to be accepted, before any vocabulary row is computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.errors import UserError
from adaflash.length.adaptive import ThresholdHead, scalar_loss
from adaflash.length.base import LengthPolicy, Outcome
from adaflash.length.hazard import hazard_loss, survival
from adaflash.types import Proposal

WIDTH = 128
ROWS = 256  # vocabulary rows that exist at one time when features are taken from them in training
FEATURES = 3  # log of the largest probability, entropy, margin of the logits


class SurvivalHead(nn.Module):
    """Logits of the hazards a_k from [x_k, mean of all slots, last slot, k], one hidden layer and a residual.

    The parts of the block are projected once, not once a slot. States are brought to unit RMS first: their scale is the
    final norm's, and differs between targets by orders of magnitude.
    """

    def __init__(self, hidden_size: int, block_size: int, features: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.slot = nn.Linear(hidden_size, width)
        self.block = nn.Linear(2 * hidden_size, width, bias=False)
        self.place = nn.Embedding(block_size - 1, width)
        self.vocabulary = nn.Linear(features, width, bias=False) if features else None
        self.res = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, hidden: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits [N, K] from block states [N, B, H], and vocabulary features [N, K, 3] if the head was made for them."""
        states = F.rms_norm(hidden.to(self.slot.weight.dtype), hidden.shape[-1:])
        block = self.block(torch.cat([states.mean(1), states[:, -1]], dim=-1))
        h = self.slot(states[:, 1:]) + block[:, None] + self.place.weight
        if self.vocabulary is not None:
            assert features is not None
            h = h + self.vocabulary(features.to(h.dtype))
        h = F.silu(h)
        h = h + F.silu(self.res(h))
        return self.out(h).squeeze(-1)


class LearnsSurvival(LengthPolicy):
    """A policy that learns S_k, and the paper's head beside it: servers that know only that one always get it.

    Args:
        vocab_features: Also look at the drafter's largest probability, entropy and margin: better informed, but all K
            vocabulary rows are computed, and rejection sampling refuses it.
    """

    def __init__(self, vocab_features: bool = False) -> None:
        super().__init__()
        self.vocab_features = self.needs_logits = vocab_features

    def build(self, hidden_size: int, block_size: int) -> None:
        if hasattr(self, "hazard"):
            return
        self.hazard = SurvivalHead(hidden_size, block_size, FEATURES if self.vocab_features else 0)
        self.head = ThresholdHead(hidden_size)

    def survival(self, proposal: Proposal) -> Tensor:
        """S_k [R, K] of a drafted round."""
        features = _features(proposal.logits) if self.vocab_features and proposal.logits is not None else None
        return survival(self.hazard(proposal.hidden, features))

    def forecast(self, proposal: Proposal) -> Tensor:
        """Expected acceptance is the sum of the S_k."""
        alive = self.survival(proposal)
        return torch.cat([alive.sum(1, keepdim=True), alive], 1)

    def loss(self, outcome: Outcome) -> Tensor:
        """The survival likelihood over all blocks, and the paper's loss over labelled ones."""
        features = vocabulary_features(outcome) if self.vocab_features else None
        logits = self.hazard(outcome.hidden, features)
        return hazard_loss(logits, outcome.agreed, outcome.known) + scalar_loss(self.head, outcome)

    def counted(self, outcome: Outcome) -> Tensor:
        """A block that a length limit cut off still tells of the candidates before the cut."""
        return outcome.known.any(1)


class SurvivalLength(LearnsSurvival):
    """Verify candidate k while its chance to survive, S_k, is at least `threshold`: right where each row costs the same.

    Args:
        threshold: Smallest chance worth a row, in [0, 1].
        vocab_features: See `LearnsSurvival`.
    """

    def __init__(self, threshold: float = 0.3, vocab_features: bool = False) -> None:
        super().__init__(vocab_features)
        if not 0 <= threshold <= 1:
            raise UserError(f"SurvivalLength: threshold is {threshold}; allowed are 0 .. 1")
        self.threshold = threshold

    def choose(self, proposal: Proposal) -> Tensor:
        return (self.survival(proposal) >= self.threshold).sum(-1).minimum(proposal.limits)

    def describe(self) -> str:
        return f"SurvivalLength(threshold={self.threshold}{', vocab_features' if self.vocab_features else ''})"


@torch.no_grad()
def vocabulary_features(outcome: Outcome) -> Tensor:
    """Features [N, K, 3] of all candidates of trained blocks; only `ROWS` rows of the vocabulary exist at one time."""
    assert outcome.head is not None, "vocab_features need the target's output head"
    states = outcome.hidden[:, 1:]
    rows = [_features(outcome.head(part)) for part in states.flatten(0, 1).split(ROWS)]
    return torch.cat(rows).unflatten(0, states.shape[:2])


def _features(logits: Tensor) -> Tensor:
    """[..., 3] from logits [..., V]: log of the largest probability, entropy in nats, margin of the two largest."""
    scores = logits.float()
    log_p = scores.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    best = scores.topk(2, dim=-1).values
    return torch.stack([log_p.amax(-1), entropy, best[..., 0] - best[..., 1]], dim=-1)
