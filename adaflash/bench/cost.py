"""Measures the cost table: every point of the grid in turn, in a new order each round, so that drift is shared by all."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

import torch

from adaflash.blocks import block_tokens
from adaflash.decoding.cache import LanePool
from adaflash.drafters.base import Drafter, embed_blocks
from adaflash.length.base import LengthPolicy
from adaflash.length.cost_table import CostTable, fingerprint, rising
from adaflash.targets.hf import HFTarget
from adaflash.types import Proposal, Segments

INGESTED = 2  # context rows a request hands over in a typical round
Point = tuple[int, int, int]  # context, load, width; width 0 is the drafter


def widths_of(block_size: int) -> tuple[int, ...]:
    """Windows that are measured: dense where they are short, about four for every doubling further on."""
    wanted = {1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, *range(40, block_size, 8), block_size}
    return tuple(sorted(width for width in wanted if width <= block_size))


def measure(
    target: HFTarget,
    drafter: Drafter,
    policy: LengthPolicy | None = None,
    loads: Sequence[int] = (1, 4, 16, 32),
    contexts: Sequence[int] = (64, 256),
    rounds: int = 7,
    tell: Callable[[int], None] = lambda done: None,
) -> CostTable:
    """Seconds of every point: the minimum over the rounds, made monotone; medians are kept beside it for people."""
    stages = {context: Stage(target, drafter, policy, max(loads), context) for context in contexts}
    points = [(c, r, w) for c in contexts for r in loads for w in (0, *widths_of(drafter.block_size))]
    seconds: dict[Point, list[float]] = {point: [] for point in points}
    order, rng = list(points), random.Random(0)
    with torch.no_grad():
        for context, load, width in points[:1] + points[1:2]:
            stages[context].play(load, width)  # the first call of anything is slow
        for done in range(rounds):
            rng.shuffle(order)
            for context, load, width in order:
                seconds[context, load, width].append(stages[context].play(load, width))
            tell(done + 1)
    least, typical = ({p: f(s) for p, s in seconds.items()} for f in (min, median))
    verify, draft = _grid(least, contexts, loads, drafter.block_size)
    medians = _grid(typical, contexts, loads, drafter.block_size)
    about = {
        "rounds": rounds,
        "verify_median": medians[0],
        "draft_median": medians[1],
        "load_average": os.getloadavg()[0],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    grid = tuple(contexts), tuple(loads), widths_of(drafter.block_size)
    return CostTable(*grid, verify, draft, fingerprint(target, drafter), about)


class Stage:
    """Pools filled to one context, and the two acts to be timed."""

    def __init__(
        self, target: HFTarget, drafter: Drafter, policy: LengthPolicy | None, lanes: int, context: int
    ) -> None:
        self.target, self.drafter, self.policy, self.context = target, drafter, policy, context
        self.pool, self.draft_pool = (LanePool(lanes, context + drafter.block_size + INGESTED) for _ in range(2))
        self._fill(lanes)

    def play(self, load: int, width: int) -> float:
        """Seconds of a verify pass of `width` tokens a request; width 0: of a draft."""
        self._wait()
        start = time.perf_counter()
        if width:
            self._verify(load, width)
        else:
            with self.target.autocast():
                self._draft(load)
        self._wait()
        return time.perf_counter() - start

    @torch.no_grad()
    def _fill(self, lanes: int) -> None:
        """One text is read once; all lanes get copies of it."""
        one = LanePool(1, self.context)
        tokens = torch.arange(self.context, device=self.target.device) % self.target.embedding_rows
        features = self.target.read(tokens, Segments.whole([self.context]), self.drafter.context_layers, one)
        self.rows = features.context[: INGESTED * lanes]
        for lane in range(lanes):
            whole = Segments((lane,), (0,), (self.context,))
            for layer in range(self.target.num_layers):
                keys, values = one.read(layer, 0, self.context)
                self.pool.write(layer, keys.transpose(0, 1), values.transpose(0, 1), whole)
            with self.target.autocast():
                self.drafter.ingest(features.context, whole, self.draft_pool)

    def _verify(self, load: int, width: int) -> None:
        segments = Segments(tuple(range(load)), (self.context,) * load, (width,) * load)
        tokens = torch.arange(load * width, device=self.target.device) % self.target.embedding_rows
        hidden = self.target.read(tokens, segments, self.drafter.context_layers, self.pool).hidden
        self.target.head(hidden).argmax(-1)
        if width > 1:  # the rows of the drafter's own candidates
            self.drafter.head(self.target)(hidden[: load * (width - 1)]).argmax(-1)

    def _draft(self, load: int) -> None:
        segments = Segments(tuple(range(load)), (self.context,) * load, (INGESTED,) * load)
        rows = self.rows[torch.arange(load * INGESTED, device=self.rows.device) % len(self.rows)]
        self.drafter.ingest(rows, segments, self.draft_pool)
        last = torch.zeros(load, dtype=torch.int64, device=self.target.device)
        tokens = block_tokens(last, self.drafter.block_size, self.drafter.mask_id)
        embeds = embed_blocks(self.target, tokens, next(self.drafter.parameters()).dtype)
        anchors = torch.full_like(last, self.context)
        hidden = self.drafter.draft(embeds, anchors, list(range(load)), self.draft_pool)
        if self.policy is not None and not self.policy.needs_logits:
            self.policy.forecast(Proposal(hidden, torch.full_like(last, self.drafter.block_size - 1)))

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def _grid(
    seconds: dict[Point, float], contexts: Sequence[int], loads: Sequence[int], block_size: int
) -> tuple[list[list[list[float]]], list[list[float]]]:
    """Verify [context][load][width] and draft [context][load]; rising with width, with load, and with context."""
    widths = widths_of(block_size)
    verify = [[rising([seconds[c, r, w] for w in widths]) for r in loads] for c in contexts]
    draft = [rising([seconds[c, r, 0] for r in loads]) for c in contexts]
    for before, after in pairwise(verify):
        for low, high in zip(before, after, strict=True):
            high[:] = [max(pair) for pair in zip(low, high, strict=True)]
    for less, more in pairwise(draft):
        more[:] = [max(pair) for pair in zip(less, more, strict=True)]
    return verify, draft
