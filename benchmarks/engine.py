"""Speed of the decoding engine on the real target, as ratios measured in one run.

    python benchmarks/engine.py                  # several rounds
    python benchmarks/engine.py --quick --json   # one round; the last line is JSON

(a) plain decoding in our engine against transformers' `generate`, at batch 1 and as one padded batch of 16 requests
    with prompts and limits of different lengths (greedy; a response ends at its limit or at the model's stop id);
(b) the engine with a drafter and fixed blocks at 1, 4, 16, 32 lanes against a plain loop, one request after another,
    with the same drafter and blocks (an untrained drafter: speeds of rounds, not of acceptance, are compared);
(c) the time of a round by part, and the share that is neither target nor drafter (host).

Ways are interleaved A B B A (--quick: the loop once, A B); a ratio is that of the sums of each way's best times a
group. Every way's tokens are compared with the first one's: a speed that changes the text is no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

import adaflash
from adaflash.data.rows import parse_row
from adaflash.data.tokenizer import load_renderer
from adaflash.decoding.cache import LanePool, pool_bytes
from adaflash.decoding.engine import Engine
from adaflash.drafters.base import embed_blocks
from adaflash.drafters.dflash import DFlash
from adaflash.length.fixed import FullBlock
from adaflash.targets.fetch import resolve
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request, Segments

TARGET = "smollm2-135m"
Texts = list[list[int]]


@dataclass
class Way:
    """One way to decode a group of requests, and its seconds by group, a list of repeats each."""

    name: str
    decode: Callable[[Sequence[Request]], Texts]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    differing: int = 0

    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.tokens.values()) / sum(min(each) for each in self.seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--dtype", default="auto", help="format of the target's weights, ours and the rival's alike")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, one round")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: cores that are free now")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or free_cores())
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    torch.set_grad_enabled(False)
    tokens, rounds = (24, 1) if args.quick else (96, 3)
    bench = Bench(args.target, tokens, rounds, args.dtype)
    result = {**bench.plain(), **bench.lanes((1, 16) if args.quick else (1, 4, 16, 32)), **bench.split()}
    result |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "tokens": tokens, "rounds": rounds}
    if args.json:
        print(json.dumps(result))


def free_cores() -> int:
    """Threads that can run at once: on a busy machine, threads that wait for each other measure the neighbours."""
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - round(os.getloadavg()[0])))


class Bench:
    """The target twice (ours, and with transformers' own attention), a drafter, and 32 requests of shipped prompts."""

    def __init__(self, target: str, tokens: int, rounds: int, dtype: str) -> None:
        self.rounds = rounds
        options = TargetOptions(dtype=dtype)  # type: ignore[arg-type]
        self.target = HFTarget.load(target, options)
        self.theirs = AutoModelForCausalLM.from_pretrained(resolve(target), dtype=options.format).eval()
        self.drafter = DFlash(num_layers=2, block_size=4)
        self.drafter.build(self.target, "<empty_output>")
        self.requests = [Request(prompt, tokens) for prompt in prompts(target, 32)]
        self.ragged = [Request(r.prompt, 4 + tokens * (5 * i % 16) // 15) for i, r in enumerate(self.requests[:16])]

    def plain(self) -> dict[str, float]:
        """(a) plain decoding against `generate`."""
        singles = [[each] for each in self.requests[: 1 + 3 * (self.rounds > 1)]]
        one = self._compare("plain, batch 1", singles, self._engine(1, False), self._generate())
        ragged = self._compare("plain, 16 ragged", [self.ragged], self._engine(16, False), self._generate())
        result = {"plain_vs_generate_b1": one, "plain_vs_generate_b16": ragged}
        if self.rounds > 1:
            name = "plain_vs_generate_b16_one_limit"
            result[name] = self._compare(
                "plain, 16, one limit", [self.requests[:16]], self._engine(16, False), self._generate()
            )
        return result

    def lanes(self, counts: Sequence[int]) -> dict[str, float]:
        """(b) the engine at several loads against the loop."""
        loop = Way("loop", lambda requests: [speculate(self.target, self.theirs, self.drafter, r) for r in requests])
        return {
            f"batched_vs_loop_b{n}": self._compare(
                f"fixed blocks, {n} requests", [self.requests[:n]], self._engine(n, True), loop
            )
            for n in counts
        }

    def split(self) -> dict[str, float]:
        """(c) where the time of 16 drafted requests goes."""
        engine = Engine(self.target, self.drafter, FullBlock(), lanes=16)
        engine.generate([Request(each.prompt, 3) for each in self.requests[:16]])
        before, start = dict(engine.seconds), time.perf_counter()
        engine.generate(self.requests[:16])
        wall = time.perf_counter() - start
        parts = {name: (value - before[name]) / wall for name, value in engine.seconds.items()}
        print("\nshare of a drafted run, 16 requests: " + ", ".join(f"{k} {v:.1%}" for k, v in parts.items()))
        host = 1 - sum(value for name, value in parts.items() if name != "accept")
        print(f"host (accept and everything outside): {host:.2%}")
        capacity = max(len(r.prompt) + r.max_new_tokens for r in self.requests[:16]) + self.drafter.block_size
        config = self.target.config
        computed = pool_bytes(
            16, capacity, self.target.num_layers, config.num_key_value_heads, config.head_dim, self.target.dtype
        )
        print(f"pool: {engine.memory['target_pool'] / 1e6:.1f} MB, as computed {computed / 1e6:.1f} MB")
        return {"host_share": host, "pool_bytes": engine.memory["target_pool"], "pool_bytes_computed": computed}

    def _engine(self, lanes: int, drafts: bool) -> Way:
        engine = Engine(self.target, self.drafter if drafts else None, FullBlock(), lanes=lanes)
        return Way("engine", lambda requests: [each.response.tolist() for each in engine.generate(requests)])

    def _generate(self) -> Way:
        return Way("generate", lambda requests: padded_generate(self.theirs, requests))

    def _compare(self, title: str, groups: Sequence[Sequence[Request]], ours: Way, rival: Way) -> float:
        """Ratio of our speed to the rival's, warm, interleaved."""
        rival = Way(rival.name, rival.decode)
        short = [Request(each.prompt, 3) for each in groups[0]]
        for way in (ours, rival):
            way.decode(short)
        for _ in range(3 if rival.name == "generate" else self.rounds):  # short runs: the best of few says little
            for number, group in enumerate(groups):
                turns = (ours, rival, rival, ours) if self.rounds > 1 or rival.name == "generate" else (ours, rival)
                texts = [_timed(way, number, group) for way in turns]
                rival.differing += sum(a != b for a, b in zip(texts[0], texts[1], strict=True))
        ratio = ours.speed() / rival.speed()
        print(
            f"{title:26s} ours {ours.speed():7.1f} tokens/s, {rival.name} {rival.speed():7.1f}, ratio {ratio:.2f}"
            f"{f', {rival.differing} TEXTS DIFFER' if rival.differing else ''}",
            flush=True,
        )
        return ratio


def _timed(way: Way, number: int, group: Sequence[Request]) -> Texts:
    start = time.perf_counter()
    texts = way.decode(group)
    way.seconds.setdefault(number, []).append(time.perf_counter() - start)
    way.tokens[number] = sum(map(len, texts))
    return texts


def prompts(target: str, count: int) -> list[tuple[int, ...]]:
    """Shipped prompts of all domains in turn, rendered for the target."""
    renderer = load_renderer(target)
    files = sorted((Path(adaflash.__file__).parent / "data" / "shipped" / "eval").glob("*.jsonl"))
    rows = [
        json.loads(line) for group in zip(*(f.read_text().splitlines() for f in files), strict=False) for line in group
    ]
    return [renderer.prompt(parse_row(row, str(i))).tokens for i, row in enumerate(rows[:count])]


def padded_generate(model: PreTrainedModel, requests: Sequence[Request]) -> Texts:
    """transformers' own batch: left-padded, as long as the longest; each text cut at its stop id and its own limit."""
    width, stop = max(len(r.prompt) for r in requests), model.generation_config.eos_token_id
    ids = torch.tensor([[stop] * (width - len(r.prompt)) + list(r.prompt) for r in requests])
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
    longest = max(r.max_new_tokens for r in requests)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=stop)
    texts = [row[: r.max_new_tokens] for row, r in zip(out[:, width:].tolist(), requests, strict=True)]
    return [row[: row.index(stop) + 1] if stop in row else row for row in texts]


def speculate(target: HFTarget, model: PreTrainedModel, drafter: DFlash, request: Request) -> list[int]:
    """The oracle of (b): one request, fixed blocks, a cache that is cropped; nothing is shared or overlapped."""
    tokens, limit = list(request.prompt), len(request.prompt) + request.max_new_tokens
    cache, drafts, wanted = (
        DynamicCache(),
        LanePool(1, limit + drafter.block_size),
        [i + 1 for i in drafter.context_layers],
    )
    window, seen = list(tokens), 0
    while True:
        out = model(torch.tensor([window]), cache=cache, output_hidden_states=wanted)
        choices = out.logits[0].argmax(-1).tolist()
        if seen == 0:
            accepted, new = len(window) - 1, [choices[-1]]
        else:
            accepted = next(
                (i for i, (d, c) in enumerate(zip(window[1:], choices, strict=False)) if d != c), len(window) - 1
            )
            new = [*window[1 : accepted + 1], choices[accepted]]
        for token in new:
            tokens.append(token)
            if token in target.stop_ids or len(tokens) == limit:
                return tokens[len(request.prompt) :]
        context = torch.cat([out.hidden_states[i][0, : accepted + 1] for i in wanted], dim=-1)
        with target.autocast():
            drafter.ingest(context, Segments((0,), (seen,), (accepted + 1,)), drafts)
        if extra := len(window) - 1 - accepted:
            cache.crop(-extra)
        seen += accepted + 1
        masked = torch.tensor([[tokens[-1]] + [drafter.mask_id] * (drafter.block_size - 1)])
        with target.autocast():
            hidden = drafter.draft(embed_blocks(target, masked, torch.float32), torch.tensor([seen]), [0], drafts)
        count = min(drafter.block_size - 1, limit - len(tokens) - 1)
        window = [tokens[-1], *target.head(hidden[0, 1 : count + 1]).argmax(-1).tolist()]


if __name__ == "__main__":
    main()
