"""What proof A needs: a scripted drafter that is often right, length policies, and transformers' own text as oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from length_costs import table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adaflash.decoding.engine import Engine
from adaflash.drafters.base import Drafter
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.base import LengthPolicy
from adaflash.length.cost_aware import CostAware
from adaflash.length.fixed import FixedLength, FullBlock
from adaflash.length.survival import SurvivalLength
from adaflash.types import KeyValues, Proposal, Request, Segments, Trajectory

BLOCK = 8
HIDDEN = 64


class Scripted(Drafter):
    """Proposes the known responses, each candidate right with probability `accuracy`.

    It knows its lane only by the context rows it was handed: a wrong, missing or displaced row is an error here, or
    with strict=False makes it guess.
    """

    strict = True

    def __init__(self, oracle: PreTrainedModel, known: dict[tuple[int, ...], list[int]], accuracy: float = 0.8) -> None:
        super().__init__()
        self.block_size, self.mask_id, self.context_layers = BLOCK, tiny.VOCAB - 1, (0, 2)
        self.accuracy, self.rng = accuracy, random.Random(0)
        self.unembedding = oracle.get_output_embeddings().weight.detach()
        self.register_parameter("dtype", torch.nn.Parameter(torch.zeros(1, dtype=oracle.dtype)))
        self.known = [[*prompt, *response] for prompt, response in known.items()]
        self.contexts = [self._context(oracle, tokens) for tokens in self.known]
        self.lanes: dict[int, list[Tensor]] = {}

    def build(self, target: object) -> None: ...

    def forward(self, *_: object) -> Tensor:
        raise NotImplementedError

    def ingest(self, context: Tensor, segments: Segments, pool: KeyValues) -> None:
        for lane, start, rows in zip(segments.lanes, segments.starts, context.split(segments.counts), strict=True):
            held = self.lanes.get(lane, []) if start else []
            assert len(held) == start, "context rows must arrive in order, each once"
            self.lanes[lane] = [*held, *rows]

    def draft(self, embeds: Tensor, anchors: Tensor, lanes: list[int], pool: KeyValues) -> Tensor:
        return torch.stack([self._block(self.lanes[lane], int(a)) for lane, a in zip(lanes, anchors, strict=True)])

    def _block(self, rows: list[Tensor], anchor: int) -> Tensor:
        assert len(rows) == anchor, "the drafter must see exactly the positions before the anchor"
        errors = [
            float((rows[-1] - context[anchor - 1]).abs().max()) if anchor < len(tokens) else float("inf")
            for tokens, context in zip(self.known, self.contexts, strict=True)
        ]
        best = min(range(len(errors)), key=errors.__getitem__)
        found = errors[best] < 1e-2
        assert found or not self.strict, f"no known text has this context at {anchor - 1}: {errors[best]:.2e}"
        text = [*self.known[best], *[0] * BLOCK][anchor + 1 : anchor + BLOCK]
        right = self.accuracy if found else 0.0
        guess = [t if self.rng.random() < right else self.rng.randrange(tiny.VOCAB) for t in text]
        return torch.stack([self.unembedding[0], *(self.unembedding[token] for token in guess)])

    @torch.no_grad()
    def _context(self, oracle: PreTrainedModel, tokens: list[int]) -> Tensor:
        states = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1][0] for layer in self.context_layers], dim=-1)


class RandomLength(LengthPolicy):
    """Any length at all."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def choose(self, proposal: Proposal) -> Tensor:
        return torch.randint(0, BLOCK + 1, proposal.limits.shape, generator=self.generator)


class Confident(LengthPolicy):
    """Looks at the candidates' own probabilities: allowed under exact match."""

    needs_logits = True

    def choose(self, proposal: Proposal) -> Tensor:
        assert proposal.probability is not None
        return (proposal.probability.cumprod(-1) > 0.3).sum(-1)


def adaptive() -> LengthPolicy:
    policy = AdaptiveLength()
    policy.build(HIDDEN, BLOCK)
    return policy


class MadeUpCost(CostAware):
    """Survival + cost by a made-up table: its head is untrained, and it falls back and probes all the time."""

    def __init__(self, fall_back: bool) -> None:
        super().__init__(fall_back, probe_every=3)
        self.build(HIDDEN, BLOCK)

    def prepare(self, target: object, drafter: object) -> None:
        self.use(table(BLOCK, lambda n: 1 + (n - 1) // 4, lambda load: 4.0))


class Toggling(FullBlock):
    """Drafts in some rounds only; context rows queue in between."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(5)

    def drafts(self, load: int) -> bool:
        return self.rng.random() < 0.4


def survival() -> LengthPolicy:
    policy = SurvivalLength(threshold=0.1)
    policy.build(HIDDEN, BLOCK)
    return policy


POLICIES = {
    "full": FullBlock, "fixed": lambda: FixedLength(3), "zero": lambda: FixedLength(0), "random": RandomLength,
    "adaptive": adaptive, "confident": Confident, "survival": survival, "cost": lambda: MadeUpCost(False),
    "cost_or_plain": lambda: MadeUpCost(True), "toggling": Toggling,
}  # fmt: skip


class KeyedChoice(LogitsProcessor):
    """transformers' own temperature, top-k and top-p in float64, then the inverse CDF at the keyed uniform number.

    Leaves only the chosen token, so that greedy decoding takes it. Everything is written apart from the engine's
    sampler, with plain integers. `margin` is the smallest distance of any decision from flipping.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.margin = request, float("inf")
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(request.temperature)])
        if request.top_k:
            self.warpers.append(TopKLogitsWarper(request.top_k))
        if request.top_p < 1:
            self.warpers.append(TopPLogitsWarper(request.top_p))

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        p = self.warpers(ids, scores.double()).softmax(-1)[0]
        self._note_edges(scores[0].double() / self.request.temperature)
        u = splitmix_uniform(self.request.seed, ids.shape[1])
        cdf = (p / p.sum()).cumsum(0)
        token = int((cdf <= u).sum())
        self.margin = min(self.margin, float((cdf - u).abs().min()))
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)

    def _note_edges(self, scores: Tensor) -> None:
        """How close top-k and top-p came to keeping another set."""
        ordered = scores.sort(descending=True).values
        if self.request.top_k:
            self.margin = min(self.margin, float(ordered[self.request.top_k - 1] - ordered[self.request.top_k]))
            ordered = ordered[: self.request.top_k]
        if self.request.top_p < 1:
            self.margin = min(self.margin, float((ordered.softmax(0).cumsum(0) - self.request.top_p).abs().min()))


def splitmix_uniform(seed: int, position: int) -> float:
    """The uniform number of a (seed, position), with Python's integers."""
    keep = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & keep
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & keep
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix(mix((seed * golden + 0xBF58476D1CE4E5B9) & keep) + position * golden & keep)
    return ((mix(key + golden & keep) >> 12) + 0.5) * 2.0**-52


def sampled(oracle: PreTrainedModel, request: Request) -> tuple[list[int], float]:
    """The text transformers generates for a sampled request, and its margin."""
    choice = KeyedChoice(request)
    ids = torch.tensor([request.prompt])
    out = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False,
        eos_token_id=list(request.stop_ids) or None, pad_token_id=0, logits_processor=LogitsProcessorList([choice]),
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist(), choice.margin


@torch.no_grad()
def rounding(oracle: PreTrainedModel, texts: Sequence[list[int]]) -> float:
    """How far logits move between a read of the whole text and of a shorter one."""
    worst = 0.0
    for tokens in texts:
        whole, short = (oracle(torch.tensor([part])).logits[0] for part in (tokens, tokens[: len(tokens) // 2 + 1]))
        worst = max(worst, float((whole[: len(short)] - short).abs().max()))
    return worst


def assert_same(
    engine: Engine, oracle: PreTrainedModel, wanted: dict[tuple[int, ...], list[int]], how: Request
) -> list[Trajectory]:
    """Compare with the oracle's text; on a difference say where, and how close the race was."""
    results = engine.generate([replace(how, prompt=prompt) for prompt in wanted])
    for (prompt, response), result in zip(wanted.items(), results, strict=True):
        got = result.response.tolist()
        if got != response or result.error:
            at = next((i for i, (a, b) in enumerate(zip(got, response, strict=False)) if a != b), len(got))
            margin = tiny.margin(oracle, [*prompt, *response[: at + 1]], len(prompt) + at)
            pytest.fail(
                f"position {len(prompt) + at}: {got} instead of {response}, margin {margin:.1e}, {result.error}"
            )
    return results


class Pair:
    """A target, its oracle, and greedy texts whose margins are far above rounding (else it reseeds: no flakes)."""

    def __init__(
        self, family: str, count: int, length: int, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> None:
        for seed in range(20):
            model = tiny.model(family, seed, dtype, **changes)
            self.oracle = tiny.oracle(model)
            prompts = [p.tokens for p in tiny.prompts(count, seed=seed)]
            self.wanted = {prompt: tiny.greedy(self.oracle, prompt, length) for prompt in prompts}
            texts = [[*p, *r] for p, r in self.wanted.items()]
            closest = min(tiny.margin(self.oracle, [*p, *r], len(p)) for p, r in self.wanted.items())
            if closest > 100 * rounding(self.oracle, texts[:2]):
                self.target = tiny.HFTarget(model)
                return
        raise AssertionError("no seed has clear margins")

    def scripted(self, accuracy: float = 0.8) -> Scripted:
        return Scripted(self.oracle, self.wanted, accuracy)
