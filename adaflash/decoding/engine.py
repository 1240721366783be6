"""The decoding engine. Rollouts, validation, `generate` and benchmarks are all this one.

`Engine(target, drafter, policy).generate(requests)` gives results; `.stream(requests)` tells of tokens as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from adaflash.decoding.requests import Intake, room
from adaflash.decoding.session import Session
from adaflash.decoding.settings import Progress, Settings
from adaflash.decoding.verify import Verification
from adaflash.drafters.base import Drafter
from adaflash.errors import UserError
from adaflash.length.base import LengthPolicy
from adaflash.length.fixed import FullBlock
from adaflash.targets.attention import Layout
from adaflash.targets.hf import HFTarget
from adaflash.types import Request, Trajectory

__all__ = ["Engine", "Progress"]


class Engine:
    """Continuous batching, lossless at every batch size: the text is the target's own.

    Args:
        target: The frozen target.
        drafter: None decodes plainly.
        policy: How many candidates to verify; the full block by default.
        lanes: Requests decoded at once.
        keep_states: Keep context and teacher states in the trajectories (rollouts need them).
        keep_windows: Keep in the block log the target's states along each drafted window, mistakes included.
        all_candidates: Compute all K vocabulary rows and log them, so that lost tokens are exact (validation).
        verification: `exact` gives every request the same text with any drafter or none. `rejection` gives sampled
            text of the same law, and needs a policy that does not look at the candidates.
        layout: How attention is computed; `auto` chooses per pass. It changes the speed only.

    Attributes:
        seconds: Wall time by part of the round, over all streams.
        passes: Passes of the target, rows verified, prompt rows.
        memory: Bytes of the pools of the last stream.
    """

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None = None,
        policy: LengthPolicy | None = None,
        *,
        lanes: int = 8,
        keep_states: bool = False,
        keep_windows: bool = False,
        all_candidates: bool = False,
        verification: Verification = "exact",
        layout: Layout = "auto",
    ) -> None:
        if lanes < 1:
            raise UserError(f"lanes is {lanes}; at least 1 request must be decoded at once")
        policy = policy or FullBlock()
        if verification == "rejection" and policy.needs_logits:
            raise UserError(
                f"{policy.describe()} looks at the drafted candidates; with rejection sampling that changes the text's "
                "law. Use a policy that reads hidden states only, or verification exact"
            )
        if drafter is not None:
            policy.prepare(target, drafter)
        self.target, self.drafter, self.policy, self.num_lanes = target, drafter, policy, lanes
        self._settings = Settings(
            target, drafter, policy, keep_states, keep_windows, all_candidates, verification, layout
        )
        self._cancelled: set[int] = set()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time by part of the round: prefill, ingest, draft, head, verify, accept."""
        return self._settings.seconds

    @property
    def passes(self) -> Counter[str]:
        """`verify` passes of the target after prefill, `verify_rows` and `prompt_rows`."""
        return self._settings.passes

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of `target_pool` and `draft_pool` in the last stream that came to its end."""
        return self._settings.memory

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode all requests; results in their order. A request that cannot be served has finish "error"."""
        results = {news.index: news.done for news in self.stream(requests) if news.done is not None}
        return [results[index] for index in range(len(requests))]

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Progress]:
        """Decode, telling of every token as it is committed. Stopping early leaves the engine reusable.

        Requests are numbered as they come. They may arrive while others are decoded: the iterable is asked whenever a
        place is free, and gives None if there is nothing to do yet.
        """
        known = isinstance(requests, Sequence)
        lanes = max(min(self.num_lanes, len(requests)), 1) if known else self.num_lanes  # type: ignore[arg-type]
        capacity = room([r for r in requests if r], self.target) if known else 0
        extra = self.drafter.block_size if self.drafter else 1
        session = Session(self._settings, Intake(requests), lanes, capacity + extra)
        self._cancelled = session.cancelled
        return session.run()

    def cancel(self, index: int) -> None:
        """End request `index` of the stream begun last: before its next round, with what it has."""
        self._cancelled.add(index)
