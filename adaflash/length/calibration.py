"""How far a length policy's expectations can be believed: sums that add up over rounds, domains and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from adaflash.blocks import agreeing_prefix, build_blocks
from adaflash.types import Trajectory

BINS = 10


class CalibrationStats(Metric):
    """Foreseen against real survival of candidates, by domain, position and bin of S_k; and the error of the acceptance.

    A candidate counts where its fate is known: it lies inside the response, and it and all before it were computed. That
    is decided by place alone, never by outcome: the end of a response censors candidates, it does not reject them.

    Args:
        block_size: Anchor + K candidates.
        domains: Every domain that can occur, on all ranks alike. Empty: no split.
    """

    full_state_update = False
    survival: Tensor
    acceptance: Tensor

    def __init__(self, block_size: int, domains: Sequence[str] = ()) -> None:
        super().__init__()
        self.block_size, self.domains = block_size, tuple(sorted(set(domains))) or ("",)
        # [domain, k, bin, (candidates, sum of S_k, survivors)] and [domain, (blocks, sum of |expected - A|)]
        shape = len(self.domains), block_size - 1, BINS, 3
        self.add_state("survival", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("acceptance", torch.zeros(shape[0], 2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, trajectories: Iterable[Trajectory]) -> None:
        """Count the drafted rounds of these trajectories whose policy foresaw something."""
        for each in trajectories:
            if each.blocks.forecast is not None and len(each.blocks.anchors):
                at = self.domains.index(each.domain) if each.domain in self.domains else 0
                survival, acceptance = tally(each, self.block_size)
                self.survival[at] += survival.to(self.survival.device)
                self.acceptance[at] += acceptance.to(self.acceptance.device)

    def compute(self) -> tuple[Tensor, Tensor]:
        """The sums over all ranks, on the CPU; a collective where there are several ranks."""
        return self.survival.cpu().clone(), self.acceptance.cpu().clone()


def tally(trajectory: Trajectory, block_size: int) -> tuple[Tensor, Tensor]:
    """One trajectory: survival sums [K, BINS, 3] and acceptance sums [2], float64."""
    log = trajectory.blocks
    assert log.forecast is not None
    blocks = build_blocks([trajectory], [log.anchors], block_size, mask_id=0)
    accepted = agreeing_prefix(log.candidates, blocks.labels, blocks.supervised)
    known = (blocks.supervised & (log.candidates >= 0)).long().cumprod(1).bool()
    foreseen = log.forecast[:, 1:].double()
    counts = known & foreseen.isfinite()
    place = torch.arange(block_size - 1).expand_as(foreseen)
    cell = (place * BINS + (foreseen.nan_to_num() * BINS).long().clamp(0, BINS - 1))[counts]
    real = (place < accepted[:, None]).double()
    values = torch.stack([torch.ones_like(real), foreseen, real], -1)[counts]
    sums = torch.zeros((block_size - 1) * BINS, 3, dtype=torch.float64).index_add(0, cell, values)
    whole = blocks.full & ((log.candidates >= 0) | ~blocks.supervised).all(1)
    error = (log.forecast[:, 0].double() - accepted).abs()[whole]
    return sums.unflatten(0, (block_size - 1, BINS)), torch.stack([whole.sum().double(), error.sum()])


def calibration_error(cells: Tensor) -> float | None:
    """Mean of |foreseen - real| over bins, weighted by candidates, from sums [..., 3]; None where there are none.

    The last axis but one are bins: give positions and domains summed up, or apart, as the question is.
    """
    flat = cells.reshape(-1, 3)
    count = float(flat[:, 0].sum())
    return float((flat[:, 1] - flat[:, 2]).abs().sum()) / count if count else None


def scalars(domains: Sequence[str], survival: Tensor, acceptance: Tensor) -> dict[str, float]:
    """`length/error` (mean absolute error of the acceptance, in candidates) and `length/calibration`, overall, by domain
    and by position; a number without a denominator is left out.
    """
    found: dict[str, float | None] = {"calibration": calibration_error(survival.sum((0, 1)))}
    found["error"] = _over(*acceptance.sum(0).flip(0).tolist())
    for domain, cells, (blocks, error) in zip(domains, survival, acceptance.tolist(), strict=True):
        if domain:
            found[f"calibration/{domain}"] = calibration_error(cells.sum(0))
            found[f"error/{domain}"] = _over(error, blocks)
    for k, cells in enumerate(survival.sum(0), start=1):
        found[f"calibration/{k}"] = calibration_error(cells)
    return {f"length/{name}": value for name, value in found.items() if value is not None}


def _over(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None
