"""A round's drafts: ingest what was committed, propose a block a lane, choose lengths, then compute vocabulary rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from adaflash.blocks import block_tokens
from adaflash.decoding.cache import LanePool
from adaflash.decoding.lane import Lane
from adaflash.decoding.sampling import DRAFT, best_tokens, inverse_cdf, law, noise_at
from adaflash.decoding.settings import Settings
from adaflash.decoding.verify import Draft
from adaflash.drafters.base import embed_blocks
from adaflash.types import Proposal, Request, Segments
from adaflash.vocabulary import WHOLE, DraftHead

INGEST_ROWS = 256  # context rows handed over at once: queued rows of plain rounds must not make one long stall


class Timed(Protocol):
    """Gives a context whose wall time is counted under a name."""

    def __call__(self, part: str) -> AbstractContextManager[None]: ...


class DraftRounds:
    """Drafts for the lanes of one stream.

    Args:
        settings: Target, drafter and policy. With `rejection` candidates are sampled, else the most probable ones.
        pool: Keys and values of the drafter's context.
        timed: Where the time goes.
    """

    def __init__(self, settings: Settings, pool: LanePool, timed: Timed) -> None:
        assert settings.drafter is not None
        self.target, self.drafter, self.policy = settings.target, settings.drafter, settings.policy
        self.head = settings.drafter.head(settings.target)
        self.verification, self.all_candidates = settings.verification, settings.all_candidates
        self.pool, self.timed = pool, timed
        self.num_candidates = settings.drafter.block_size - 1

    def propose(self, lanes: list[Lane]) -> dict[int, Draft]:
        """A draft by request index. A lane whose policy or law fails ends with its own error and has none."""
        with self.target.autocast():  # a draft may round
            with self.timed("ingest"):
                self._ingest(lanes)
            with self.timed("draft"):
                hidden = self._blocks(lanes)
        with self.timed("head"):
            limits = torch.tensor([min(self.num_candidates, lane.remaining - 1) for lane in lanes])
            limits = limits.to(hidden.device)
            try:
                drafts = self._choose(lanes, hidden, limits)
            except Exception:
                drafts = self._choose_apart(lanes, hidden, limits)
        return drafts

    def _ingest(self, lanes: Sequence[Lane]) -> None:
        """Hand the drafter the context rows committed since its last call, however many rounds ago that was."""
        pieces = [(lane, part) for lane in lanes for rows in lane.waiting for part in rows.split(INGEST_ROWS)]
        while pieces:
            count = 1
            while count < len(pieces) and sum(len(rows) for _, rows in pieces[: count + 1]) <= INGEST_ROWS:
                count += 1
            self._hand_over(pieces[:count])
            pieces = pieces[count:]
        for lane in lanes:
            lane.waiting.clear()

    def _hand_over(self, pieces: Sequence[tuple[Lane, Tensor]]) -> None:
        starts = []
        for lane, rows in pieces:
            starts.append(lane.ingested)
            lane.ingested += len(rows)
        places, counts = (lane.place for lane, _ in pieces), (len(rows) for _, rows in pieces)
        segments = Segments(tuple(places), tuple(starts), tuple(counts))
        self.drafter.ingest(torch.cat([rows for _, rows in pieces]), segments, self.pool)

    def _blocks(self, lanes: Sequence[Lane]) -> Tensor:
        """Block states [R, B, H]. All masks are always present, however few candidates will be verified."""
        device = self.target.device
        anchors = torch.tensor([lane.cached for lane in lanes], device=device)
        last = torch.tensor([lane.tokens[-1] for lane in lanes], device=device)
        tokens = block_tokens(last, self.drafter.block_size, self.drafter.mask_id)
        embeds = embed_blocks(self.target, tokens, next(self.drafter.parameters()).dtype)
        return self.drafter.draft(embeds, anchors, [lane.place for lane in lanes], self.pool)

    def _choose_apart(self, lanes: Sequence[Lane], hidden: Tensor, limits: Tensor) -> dict[int, Draft]:
        """Lane by lane, after a failure: only those that fail again end with an error."""
        drafts: dict[int, Draft] = {}
        for i, lane in enumerate(lanes):
            try:
                drafts |= self._choose([lane], hidden[i : i + 1], limits[i : i + 1])
            except Exception as error:
                lane.fail(f"drafting failed: {type(error).__name__}: {error}")
        return drafts

    def _choose(self, lanes: Sequence[Lane], hidden: Tensor, limits: Tensor) -> dict[int, Draft]:
        """Lengths, then candidates; rows beyond a length are not computed unless somebody needs them."""
        places = [torch.arange(lane.cached + 1, lane.cached + 1 + self.num_candidates) for lane in lanes]
        requests = [lane.request for lane in lanes]
        anchors = torch.tensor([lane.cached for lane in lanes])
        forecasts: list[Tensor | None] = [None] * len(lanes)
        if self.policy.needs_logits or self.all_candidates:
            logits = self.head(hidden[:, 1:])
            proposal = _proposal(hidden, limits, logits, self.policy.needs_logits, self.head)
            proposal = replace(proposal, anchors=anchors)
            lengths = self._lengths(proposal)
            if self.all_candidates and (expected := self.policy.forecast(proposal)) is not None:
                forecasts = list(expected.float().cpu())
            rows = list(logits)
        else:
            lengths = self._lengths(Proposal(hidden, limits, anchors=anchors))
            wanted = torch.arange(1, self.num_candidates + 1, device=hidden.device) <= lengths[:, None]
            rows = list(self.head(hidden[:, 1:][wanted]).split(lengths.tolist()))
        sampled = [self._candidates(*each) for each in zip(requests, rows, places, strict=True)]
        return {
            lane.index: Draft(candidates, _useful(candidates, length, lane.stop_ids), laws, forecast)
            for lane, (candidates, laws), length, forecast in zip(
                lanes, sampled, lengths.tolist(), forecasts, strict=True
            )
        }

    def _lengths(self, proposal: Proposal) -> Tensor:
        lengths = self.policy.choose(proposal).to(proposal.limits)
        if lengths.shape != proposal.limits.shape:
            raise ValueError(
                f"{self.policy.describe()} chose lengths {tuple(lengths.shape)} for {len(lengths)} requests"
            )
        return torch.minimum(lengths, proposal.limits).clamp(min=0)

    def _candidates(self, request: Request, logits: Tensor, places: Tensor) -> tuple[list[int], Tensor | None]:
        """Candidates of one lane from its logits [L, n], and the laws they were sampled from, if they were."""
        if self.verification == "exact" or request.temperature == 0.0:
            return self.head.ids(best_tokens(logits)).tolist(), None
        laws = law(self.head.widen(logits), request)
        noise = noise_at(request, places[: len(laws)].to(laws.device), DRAFT)
        return inverse_cdf(laws, noise).tolist(), laws


def _proposal(hidden: Tensor, limits: Tensor, logits: Tensor, probabilities: bool, head: DraftHead = WHOLE) -> Proposal:
    """With candidates and logits [R, K, n] only for a policy that asked for them."""
    if not probabilities:
        return Proposal(hidden, limits)
    best = best_tokens(logits)
    probability = logits.float().softmax(-1).gather(-1, best[..., None]).squeeze(-1)
    return Proposal(hidden, limits, head.ids(best), probability, logits)


def _useful(candidates: list[int], length: int, stop_ids: frozenset[int]) -> list[int]:
    """The first `length` candidates, cut after a drafted stop token: nothing behind it is worth verifying."""
    window = candidates[:length]
    stop = next((i for i, token in enumerate(window) if token in stop_ids), None)
    return window if stop is None else window[: stop + 1]
