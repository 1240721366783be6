"""One stream of requests through the engine.

State between rounds: every lane has n tokens in the target's pool and one more, its anchor, in no cache. A round is
admit (prefill new requests), draft a block per lane, choose its length, verify all windows in one packed pass of the
target, accept what agrees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adaflash.decoding.cache import LanePool
from adaflash.decoding.drafting import DraftRounds
from adaflash.decoding.lane import Lane
from adaflash.decoding.requests import Intake, limit, refusal
from adaflash.decoding.sampling import best_tokens
from adaflash.decoding.settings import Progress, Settings
from adaflash.decoding.text import TextStream
from adaflash.decoding.verify import Draft, Verdict, agree, judge
from adaflash.length.base import Round
from adaflash.types import Features, Request, Segments

PREFILL_ROWS = 4096  # prompt rows in one pass, unless one prompt alone is longer
PLAIN = Draft()
_NOTHING = Features(torch.empty(0, 0), torch.empty(0, 0))


class Session:
    """The lanes and pools of one stream.

    Args:
        settings: What is decoded with.
        intake: Where requests come from.
        lanes: Requests decoded at once.
        capacity: Positions a lane must hold, as far as that is known; the pools grow with what arrives.
    """

    def __init__(self, settings: Settings, intake: Intake, lanes: int, capacity: int) -> None:
        self.settings, self.intake, self.target = settings, intake, settings.target
        self.num_candidates = settings.drafter.block_size - 1 if settings.drafter else 0
        self.pool, self.draft_pool = LanePool(lanes, capacity), LanePool(lanes, capacity)
        self.active: list[Lane] = []
        self.free = list(range(lanes))
        self.cancelled: set[int] = set()
        # The clock is the settings': a method of the session would make a ring, and its pools would wait for the collector.
        self.drafts = DraftRounds(settings, self.draft_pool, settings.timed) if settings.drafter else None

    @torch.no_grad()
    def run(self) -> Iterator[Progress]:
        """Rounds until nothing is left."""
        with self.target.ranks.decoding():
            while self.active or not self.intake.exhausted:
                yield from self._admit()
                yield from self._end_cancelled()
                if self.active:
                    yield from self._round()
        self.settings.memory.update(target_pool=self.pool.bytes(), draft_pool=self.draft_pool.bytes())

    def _round(self) -> Iterator[Progress]:
        """One step of the algorithm: draft, choose lengths, verify, accept."""
        drafting = [lane for lane in self.active if lane.remaining > 1]
        wanted = bool(self.drafts and drafting) and self.settings.policy.drafts(len(self.active))
        drafts = self.drafts.propose(drafting) if self.drafts and wanted else {}
        lanes = [lane for lane in self.active if not lane.finish]
        features, rows, verdicts = self._verify(lanes, drafts) if lanes else (_NOTHING, (), [])
        with self.settings.timed("accept"):
            kept: dict[int, list[int]] = {}
            for lane, verdict, row in zip(lanes, verdicts, rows, strict=True):
                kept[lane.index] = self._accept(lane, drafts.get(lane.index), verdict, features, row)
            if lanes and self.drafts:
                self.settings.policy.observe(self._told(lanes, drafts, kept))
            news = [self._news(lane, kept.get(lane.index, [])) for lane in self.active]
            self._release()
        yield from news

    def _told(self, lanes: list[Lane], drafts: dict[int, Draft], kept: dict[int, list[int]]) -> Round:
        """The round in numbers, for the policy."""
        mine = [drafts[lane.index] for lane in lanes if lane.index in drafts]
        committed = sum(map(len, kept.values()))
        cached = sum(lane.cached for lane in lanes) - committed
        rows = len(lanes) + sum(len(draft.window) for draft in mine)
        return Round(len(lanes), len(mine), rows, committed, cached // len(lanes))

    def _verify(
        self, lanes: list[Lane], drafts: dict[int, Draft]
    ) -> tuple[Features, tuple[int, ...], list[Verdict | None]]:
        """One packed pass of the target over all windows: its states, each lane's first row, and its verdicts."""
        windows = [[lane.tokens[-1], *drafts.get(lane.index, PLAIN).window] for lane in lanes]
        with self.settings.timed("verify"):
            features, segments = self._read(lanes, [lane.cached for lane in lanes], windows)
            logits = self.target.head(features.hidden)
            mine = [drafts.get(lane.index, PLAIN) for lane in lanes]
            verdicts = self._judge(lanes, mine, logits, features, segments.offsets)
        self.settings.passes["verify"] += 1
        self.settings.passes["verify_rows"] += segments.offsets[-1]
        return features, segments.offsets[:-1], verdicts

    def _judge(
        self, lanes: list[Lane], drafts: list[Draft], logits: Tensor, features: Features, offsets: tuple[int, ...]
    ) -> list[Verdict | None]:
        """A verdict a lane; None for one that cannot be judged: it ends with an error, the others go on."""
        best = best_tokens(logits).tolist()
        finite = features.hidden.isfinite().all(-1).tolist()
        verdicts: list[Verdict | None] = []
        for lane, draft, first, last in zip(lanes, drafts, offsets, offsets[1:], strict=False):
            verdict: Verdict | None = None
            try:
                if lane.request.temperature == 0.0:
                    verdict = agree(draft.window, best[first:last])
                else:
                    verdict = judge(lane.request, draft, logits[first:last], len(lane.tokens))
                if not all(finite[first : first + verdict.accepted + 1]):
                    raise ArithmeticError("the target's states are not finite")
            except Exception as error:
                lane.fail(f"verification failed: {type(error).__name__}: {error}")
            verdicts.append(verdict)
        return verdicts

    def _accept(
        self, lane: Lane, draft: Draft | None, verdict: Verdict | None, features: Features, first: int
    ) -> list[int]:
        """Commit accepted candidates and the token behind them, cut at a stop or the limit; returns what was kept."""
        if verdict is None or lane.finish:
            return []
        window, anchor = (draft or PLAIN).window, lane.cached
        kept = lane.extend([*window[: verdict.accepted], verdict.token])
        lane.read(features, first, len(kept), teaches=True, drafting=self.drafts is not None)
        if draft is None:
            lane.plain_steps += 1
        else:
            lane.log(anchor, draft, verdict.accepted, len(kept), features, first)
        return kept

    def _admit(self) -> Iterator[Progress]:
        """Give every free place to the next request, at once, and prefill in packed passes."""
        while self.free:
            new, ended = self._take()
            yield from ended
            if not new:
                return
            with self.settings.timed("prefill"):
                news = self._prefill(new)
                self._release()
            yield from news

    def _take(self) -> tuple[list[Lane], list[Progress]]:
        """New lanes for one prefill, and news of requests that end before they begin."""
        new: list[Lane] = []
        ended: list[Progress] = []
        rows = 0
        while self.free and rows < PREFILL_ROWS and (arrived := self.intake.take()) is not None:
            lane = self._open(self.free[0], *arrived)
            if lane.finish:
                ended.append(self._news(lane, []))
            else:
                self.free.pop(0)
                new.append(lane)
                rows += len(lane.tokens)
        self.active += new
        return new, ended

    def _open(self, place: int, index: int, request: Request) -> Lane:
        """A lane for a request, ended already if there is nothing to decode."""
        if error := refusal(request, self.target):
            lane = Lane(place, index, request)
            lane.fail(error)
            return lane
        stops = frozenset(self.target.stop_ids) | frozenset(request.stop_ids)
        text = TextStream(self.target.tokenizer) if request.stop else None
        keep = self.settings.keep_states, self.settings.keep_windows
        lane = Lane(place, index, request, limit(request, self.target), stops, text, *keep)
        if index in self.cancelled:
            lane.finish = "cancelled"
        elif lane.limit == 0:
            lane.finish = "length"
        for pool in (self.pool, self.draft_pool):
            pool.reserve(len(lane.tokens) + lane.limit + self.num_candidates + 1)
        return lane

    def _prefill(self, lanes: list[Lane]) -> list[Progress]:
        """Read whole prompts; the first token of each response comes from the last row of its prompt."""
        features, segments = self._read(lanes, [0] * len(lanes), [lane.tokens for lane in lanes])
        last = [end - 1 for end in segments.offsets[1:]]
        ends = Features(features.context[last], features.hidden[last])
        verdicts = self._judge(
            lanes, [PLAIN] * len(lanes), self.target.head(ends.hidden), ends, tuple(range(len(lanes) + 1))
        )
        self.settings.passes["prompt_rows"] += segments.offsets[-1]
        news = []
        for lane, verdict, row in zip(lanes, verdicts, segments.offsets, strict=False):
            kept = []
            if verdict is not None:
                lane.read(features, row, len(lane.tokens), teaches=False, drafting=self.drafts is not None)
                kept = lane.extend([verdict.token])
            news.append(self._news(lane, kept))
        return news

    def _read(self, lanes: list[Lane], starts: list[int], windows: list[list[int]]) -> tuple[Features, Segments]:
        """One pass of the target: each lane's tokens continue what its place in the pool holds before `starts`."""
        segments = Segments(tuple(lane.place for lane in lanes), tuple(starts), tuple(map(len, windows)))
        tokens = torch.tensor([token for window in windows for token in window], device=self.target.device)
        layers = self.settings.drafter.context_layers if self.settings.drafter else ()
        return self.target.read(tokens, segments, layers, self.pool, self.settings.layout), segments

    def _end_cancelled(self) -> Iterator[Progress]:
        ended = [lane for lane in self.active if lane.index in self.cancelled]
        for lane in ended:
            lane.finish = "cancelled"
        self._release()
        yield from [self._news(lane, []) for lane in ended]

    def _news(self, lane: Lane, kept: list[int]) -> Progress:
        done = lane.trajectory(self.num_candidates) if lane.finish else None
        return Progress(lane.index, tuple(kept), done)

    def _release(self) -> None:
        self.free = sorted(self.free + [lane.place for lane in self.active if lane.finish])
        self.active = [lane for lane in self.active if not lane.finish]
