"""The decoding loop. Rollouts, validation, `generate` and benchmarks are all this one.

State between rounds: every lane has n tokens in the target's pool and one more, its anchor, in no cache. A round is
admit (prefill new requests), draft a block per lane, choose its length, verify all windows in one packed pass of the
target, accept what agrees.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.blocks import block_tokens
from adaflash.decoding.cache import LanePool
from adaflash.decoding.lane import Lane
from adaflash.decoding.sampling import choose_packed
from adaflash.drafters.base import Drafter, embed_blocks
from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.length.fixed import FullBlock
from adaflash.targets.hf import HFTarget
from adaflash.types import BlockLog, Features, Proposal, Request, Segments, Trajectory


@dataclass(frozen=True)
class Progress:
    """News of one request: tokens just committed, and the whole result once it has ended."""

    index: int
    tokens: tuple[int, ...]
    done: Trajectory | None = None


class Engine:
    """Continuous batching, lossless at every batch size: the text is the target's own.

    Args:
        target: The frozen target.
        drafter: None decodes plainly.
        policy: How many candidates to verify; the full block by default.
        lanes: Requests decoded at once.
        keep_states: Keep context and teacher states in the trajectories (rollouts need them).
        all_candidates: Compute all K vocabulary rows and log them, so that lost tokens are exact (validation).
    """

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None = None,
        policy: LengthPolicy | None = None,
        *,
        lanes: int = 8,
        keep_states: bool = False,
        all_candidates: bool = False,
    ) -> None:
        if lanes < 1:
            raise UserError(f"lanes is {lanes}; at least 1 request must be decoded at once")
        self.target, self.drafter, self.policy = target, drafter, policy or FullBlock()
        self.num_lanes, self.keep_states, self.all_candidates = lanes, keep_states, all_candidates
        self.num_candidates = drafter.block_size - 1 if drafter else 0
        self.seconds: Counter[str] = Counter()  # wall time by part of the round
        self.passes: Counter[str] = Counter()  # target rows verified, passes, prompt rows
        self._cancelled: set[int] = set()

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode all requests; results in their order. A request that cannot be served has finish "error"."""
        results: dict[int, Trajectory] = {}
        for progress in self.stream(requests):
            if progress.done is not None:
                results[progress.index] = progress.done
        return [results[index] for index in range(len(requests))]

    def cancel(self, index: int) -> None:
        """End request `index` of the running stream at the next round, with what it has."""
        self._cancelled.add(index)

    @torch.no_grad()
    def stream(self, requests: Iterable[Request]) -> Iterator[Progress]:
        """Decode, telling of every token as it is committed. Stopping early leaves the engine reusable."""
        queue = deque(enumerate(requests))
        self._begin([request for _, request in queue])
        while queue or self._active:
            yield from self._admit(queue)
            yield from self._end_cancelled()
            if self._active:
                yield from self._round()

    def _begin(self, requests: Sequence[Request]) -> None:
        """An empty pool, as long as the longest request needs."""
        longest = max((len(r.prompt) + max(self._limit(r), 0) for r in requests), default=0)
        capacity = longest + self.num_candidates + 1
        self._pool = LanePool(self.num_lanes, capacity)
        self._draft_pool = LanePool(self.num_lanes, capacity)
        self._active: list[Lane] = []
        self._free = list(range(self.num_lanes))
        self._cancelled.clear()

    def _round(self) -> Iterator[Progress]:
        """One step of the algorithm: draft, length, verify, accept."""
        drafting = [lane for lane in self._active if self.drafter is not None and lane.remaining > 1]
        blocks = self._draft(drafting) if drafting else []
        chosen = {lane.index: block for lane, block in zip(drafting, blocks, strict=True)}
        windows = [[lane.tokens[-1], *chosen.get(lane.index, _PLAIN).window] for lane in self._active]
        features, choices, offsets = self._verify(self._active, windows)
        with self._timed("accept"):
            news = [
                self._accept(lane, chosen.get(lane.index), features, first, choices[first:last])
                for lane, first, last in zip(self._active, offsets, offsets[1:], strict=False)
            ]
            self._release()
        yield from news

    def _draft(self, lanes: list[Lane]) -> list[_Draft]:
        """Propose a block for each lane, choose how much of it to verify, and only then compute vocabulary rows."""
        assert self.drafter is not None
        with self._timed("ingest"):
            self._ingest(lanes)
        with self._timed("draft"):
            anchors = torch.tensor([lane.cached for lane in lanes], device=self.target.device)
            last = torch.tensor([lane.tokens[-1] for lane in lanes], device=self.target.device)
            tokens = block_tokens(last, self.drafter.block_size, self.drafter.mask_id)
            embeds = embed_blocks(self.target, tokens, next(self.drafter.parameters()).dtype)
            hidden = self.drafter.draft(embeds, anchors, [lane.place for lane in lanes], self._draft_pool)
        with self._timed("head"):
            limits = torch.tensor([min(self.num_candidates, lane.remaining - 1) for lane in lanes])
            lengths, candidates = self._choose(hidden, limits.to(hidden.device))
        return [_Draft(c, _useful(c, n, lane.stop_ids)) for c, n, lane in zip(candidates, lengths, lanes, strict=True)]

    def _choose(self, hidden: Tensor, limits: Tensor) -> tuple[list[int], list[list[int]]]:
        """Length and candidates of each lane; rows beyond the length are not computed unless somebody needs them."""
        if self.policy.needs_logits or self.all_candidates:
            logits = self.target.head(hidden[:, 1:])
            candidates = logits.argmax(-1)
            probability = None
            if self.policy.needs_logits:
                probability = logits.float().softmax(-1).gather(-1, candidates[..., None]).squeeze(-1)
            proposal = Proposal(hidden, limits, candidates, probability)
            lengths = torch.minimum(self.policy.choose(proposal), limits).clamp(min=0)
            return lengths.tolist(), candidates.tolist()
        lengths = torch.minimum(self.policy.choose(Proposal(hidden, limits)), limits).clamp(min=0)
        wanted = torch.arange(1, self.num_candidates + 1, device=hidden.device) <= lengths[:, None]
        flat = self.target.head(hidden[:, 1:][wanted]).argmax(-1)
        return lengths.tolist(), [part.tolist() for part in flat.split(lengths.tolist())]

    def _verify(self, lanes: list[Lane], windows: list[list[int]]) -> tuple[Features, list[int], tuple[int, ...]]:
        """The target's own choice after every token of every window, in one packed pass."""
        with self._timed("verify"):
            segments = Segments(
                tuple(lane.place for lane in lanes), tuple(lane.cached for lane in lanes), tuple(map(len, windows))
            )
            features = self._read([token for window in windows for token in window], segments)
            positions = [torch.arange(lane.cached + 1, lane.cached + 1 + len(w)) for lane, w in zip(lanes, windows, strict=True)]
            choices = self._choices(self.target.head(features.hidden), positions, lanes)
        self.passes["verify"] += 1
        self.passes["verify_rows"] += segments.offsets[-1]
        return features, choices, segments.offsets

    def _accept(self, lane: Lane, draft: _Draft | None, features: Features, first: int, choices: list[int]) -> Progress:
        """Commit the agreeing prefix and the bonus token, cut at a stop or the limit."""
        window = draft.window if draft else []
        accepted = next((i for i, (d, c) in enumerate(zip(window, choices, strict=False)) if d != c), len(window))
        anchor = lane.cached
        kept = lane.extend(window[:accepted] + [choices[accepted]])
        lane.read(features, first, len(kept), teaches=True, drafting=self.drafter is not None)
        if draft is None:
            lane.plain_steps += 1
        else:
            lane.log(anchor, draft.candidates, len(window), accepted, len(kept))
        return self._progress(lane, kept)

    def _admit(self, queue: deque[tuple[int, Request]]) -> Iterator[Progress]:
        """Give every free place to the next request and prefill all of them in one packed pass."""
        new: list[Lane] = []
        while queue and len(new) < len(self._free):
            index, request = queue.popleft()
            error = self._refusal(request)
            lane = self._lane(self._free[len(new)], index, request)
            if error or lane.limit == 0:
                lane.finish = "error" if error else "length"
                yield Progress(index, (), lane.trajectory(self.num_candidates, error))
            else:
                new.append(lane)
        if not new:
            return
        self._free = self._free[len(new) :]
        self._active += new
        with self._timed("prefill"):
            segments = Segments(tuple(lane.place for lane in new), (0,) * len(new), tuple(len(lane.tokens) for lane in new))
            features = self._read([token for lane in new for token in lane.tokens], segments)
            last = [end - 1 for end in segments.offsets[1:]]
            positions = [torch.tensor([len(lane.tokens)]) for lane in new]
            firsts = self._choices(self.target.head(features.hidden[last]), positions, new)
        self.passes["prompt_rows"] += segments.offsets[-1]
        news = []
        for lane, row, token in zip(new, segments.offsets, firsts, strict=False):
            lane.read(features, row, len(lane.tokens), teaches=False, drafting=self.drafter is not None)
            news.append(self._progress(lane, lane.extend([token])))
        self._release()
        yield from news

    def _end_cancelled(self) -> Iterator[Progress]:
        ended = [lane for lane in self._active if lane.index in self._cancelled]
        for lane in ended:
            lane.finish = "cancelled"
        self._release()
        yield from [self._progress(lane, []) for lane in ended]

    def _ingest(self, lanes: list[Lane]) -> None:
        """Hand the drafter the context rows committed since its last call."""
        assert self.drafter is not None
        lanes = [lane for lane in lanes if lane.waiting]
        if not lanes:
            return
        rows = [torch.cat(lane.waiting) for lane in lanes]
        segments = Segments(
            tuple(lane.place for lane in lanes), tuple(lane.ingested for lane in lanes), tuple(len(row) for row in rows)
        )
        self.drafter.ingest(torch.cat(rows), segments, self._draft_pool)
        for lane, row in zip(lanes, rows, strict=True):
            lane.ingested += len(row)
            lane.waiting.clear()

    def _read(self, tokens: list[int], segments: Segments) -> Features:
        layers = self.drafter.context_layers if self.drafter else ()
        return self.target.read(torch.tensor(tokens, device=self.target.device), segments, layers, self._pool)

    def _choices(self, logits: Tensor, positions: list[Tensor], lanes: list[Lane]) -> list[int]:
        places = [p.to(logits.device) for p in positions]
        return choose_packed(logits, places, [lane.request for lane in lanes]).tolist()  # type: ignore[no-any-return]

    def _lane(self, place: int, index: int, request: Request) -> Lane:
        stops = frozenset(self.target.stop_ids) | frozenset(request.stop_ids)
        return Lane(place, index, request, max(self._limit(request), 0), stops, self.keep_states)

    def _limit(self, request: Request) -> int:
        return min(request.max_new_tokens, self.target.max_positions - len(request.prompt))

    def _refusal(self, request: Request) -> str:
        """Why a request cannot be served, or nothing."""
        if not request.prompt:
            return "the prompt is empty: at least one token is needed"
        if len(request.prompt) >= self.target.max_positions:
            return f"the prompt has {len(request.prompt)} tokens; the target's context holds {self.target.max_positions}"
        if max(request.prompt) >= self.target.embedding_rows or min(request.prompt) < 0:
            return f"the prompt has token ids outside 0 .. {self.target.embedding_rows - 1}"
        if request.max_new_tokens < 0:
            return f"max_new_tokens is {request.max_new_tokens}; allowed are 0 and more"
        return ""

    def _progress(self, lane: Lane, kept: list[int]) -> Progress:
        done = lane.trajectory(self.num_candidates) if lane.finish else None
        return Progress(lane.index, tuple(kept), done)

    def _release(self) -> None:
        self._free += [lane.place for lane in self._active if lane.finish]
        self._active = [lane for lane in self._active if not lane.finish]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


@dataclass(frozen=True)
class _Draft:
    candidates: list[int]  # as many as were computed
    window: list[int]  # those sent to be verified


_PLAIN = _Draft([], [])


def _useful(candidates: list[int], length: int, stop_ids: frozenset[int]) -> list[int]:
    """The first `length` candidates, cut after a drafted stop token: nothing behind it is worth verifying."""
    window = candidates[:length]
    stop = next((i for i, token in enumerate(window) if token in stop_ids), None)
    return window if stop is None else window[: stop + 1]
