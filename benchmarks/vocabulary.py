"""What a drafter saves that can say only the most frequent tokens of its traffic, and what that costs in tau.

    python benchmarks/vocabulary.py --rollouts rollouts.jsonl --checkpoint runs/quickstart   # rows of `adaflash predict`

For every size: CPU seconds of an update by part (5 layers, blocks of 16, 4 trajectories x 64 anchors) and of drafting one
block; then held-out prompts decoded with a trained drafter that is limited afterwards, token for token the target's text.
Tokens are counted over the rollouts, whose prompts are not the held-out ones. One thread; CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from profile_step import Clock, build, prompts, update

from adaflash.data.sources import ShippedSource
from adaflash.data.tokenizer import load_renderer
from adaflash.data.vocabulary import HELD_OUT, most_frequent
from adaflash.decoding.engine import Engine
from adaflash.length.fixed import FullBlock
from adaflash.module import AdaFlashModule
from adaflash.rollouts.base import Players
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.run import load_run
from adaflash.types import Request, Trajectory
from adaflash.vocabulary import DraftVocabulary

DOMAINS = ("math", "code", "chat")


def counted(path: Path, stops: tuple[int, ...], size: int, vocabulary: int) -> DraftVocabulary:
    """The most frequent tokens of the recorded responses, every tenth left out."""
    lines = [line for i, line in enumerate(path.open(), start=1) if i % HELD_OUT]
    counts = Counter(token for line in lines for token in json.loads(line)["response_ids"])
    return DraftVocabulary.of(torch.tensor(most_frequent(counts, size, stops, vocabulary)), vocabulary)


def perfect(said: DraftVocabulary, path: Path, block: int) -> dict[str, float]:
    """tau, on every tenth recorded response, of a drafter that is always right but for what it cannot say."""
    sums: dict[str, list[int]] = {}
    for index, line in enumerate(path.open(), start=1):
        row = json.loads(line)
        can = (said.place[torch.tensor(row["response_ids"])] >= 0).tolist()
        at = 0
        while index % HELD_OUT == 0 and at < len(can) - 1:
            window = can[at + 1 : at + block]
            done = 1 + ([*window, False].index(False))
            at += done
            for name in (row["domain"], "all"):
                total = sums.setdefault(name, [0, 0])
                total[0], total[1] = total[0] + done, total[1] + 1
    return {name: tokens / rounds for name, (tokens, rounds) in sorted(sums.items())}


def updates(module: AdaFlashModule, trajectories: list[Trajectory], count: int) -> dict[str, float]:
    """CPU seconds of an update by part; the first warms up."""
    for index in range(count + 1):
        if index < 2:
            clock = Clock()
        module.zero_grad()
        update(module, trajectories, index, clock)
    return {name: value / count for name, value in clock.seconds.items()}


@torch.no_grad()
def rows(module: AdaFlashModule, requests: int, count: int = 20) -> float:
    """CPU milliseconds of the vocabulary rows of one drafted round, the best of `count`."""
    head, states = module.drafter.head(module.target), torch.randn(requests * 15, module.target.hidden_size)
    best = float("inf")
    for _ in range(count):
        start = time.process_time()
        head(states).argmax(-1)
        best = min(best, time.process_time() - start)
    return 1000 * best


def decode(module: AdaFlashModule, limit: int, new: int) -> tuple[dict[str, float], list[list[int]]]:
    """tau of full blocks by domain on held-out prompts, and the text."""
    renderer = load_renderer(module.target_name)
    sources = [ShippedSource(domain, "eval", limit=limit) for domain in DOMAINS]
    for source in sources:
        source.open()
    asked = [renderer.prompt(source.row(i)) for source in sources for i in range(len(source))]
    engine = Engine(module.target, module.drafter, FullBlock(), lanes=8)
    done = engine.generate([Request(p.tokens, new, p.id, p.domain) for p in asked])
    found = {}
    for domain in (*DOMAINS, "all"):
        blocks = [each.blocks for each in done if domain in (each.domain, "all")]
        drafted = sum(len(each.anchors) for each in blocks)
        found[domain] = sum(int(each.committed.sum()) for each in blocks) / drafted
    return found, [each.tokens.tolist() for each in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--checkpoint", default="", help="a trained run; empty: no tau")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--mask-token", default="<empty_output>")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 8192, 4096])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts a domain")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build(SimpleNamespace(layers=5, block=16, target=options.target, mask_token=options.mask_token))  # type: ignore[arg-type]
    chosen = prompts(options.rollouts, 4)
    players = Players(module.target, module.drafter, module.length, 0, 0)
    trajectories = RecordedRollout().collect(chosen, players)
    trained: Any = load_run(options.checkpoint) if options.checkpoint else None
    total, text = module.target.embedding_rows, None
    for size in (total, *options.sizes):
        said = counted(options.rollouts, module.target.stop_ids, size, total)
        if size < total:
            module.drafter.limit(said)  # type: ignore[operator]
        parts = updates(module, trajectories, options.updates)
        print(f"{size:6} tokens: update " + ", ".join(f"{name} {value:.2f} s" for name, value in parts.items()))
        print(f"{'':14} rows of a round: {rows(module, 1):.1f} ms for 1 request, {rows(module, 8):.1f} ms for 8")
        limits = perfect(said, options.rollouts, 16), perfect(said, options.rollouts, 4)
        for name, bound in zip(("16", "4"), limits, strict=True):
            print(f"{'':14} at most (blocks of {name}) tau " + ", ".join(f"{d} {tau:.2f}" for d, tau in bound.items()))
        if trained is None:
            continue
        if size < total:
            trained.drafter.limit(said)
        tau, now = decode(trained, options.prompts, options.tokens)
        text = text or now
        print(f"{'':14} tau " + ", ".join(f"{domain} {value:.3f}" for domain, value in tau.items()))
        assert now == text, "the text depends on the vocabulary"


if __name__ == "__main__":
    main()
