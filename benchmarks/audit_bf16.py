"""Proof B on the real target: plain bf16 texts, read again in blocks of random width, with fp32 certificates.

    python benchmarks/audit_bf16.py --tokens 64 --prompts 4

Exit status 1 if a mismatch is larger than rounding explains.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from adaflash.data.rows import parse_row
from adaflash.data.tokenizer import load_renderer
from adaflash.decoding.audit import Audit, audit
from adaflash.decoding.engine import Engine
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request

QUESTIONS = (
    "Write a short story about a lighthouse.",
    "What is 17 times 23? Show the steps.",
    "Write a Python function that reverses a list.",
    "Explain why the sky is blue.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = HFTarget.load(args.target, TargetOptions(dtype=args.dtype)).to(device)
    full = HFTarget.load(args.target).to(device)
    renderer, rng, result = load_renderer(args.target), random.Random(args.seed), Audit()
    requests = [
        Request(renderer.prompt(parse_row({"prompt": text}, text)).tokens, args.tokens)
        for text in QUESTIONS[: args.prompts]
    ]
    for each in Engine(half, lanes=1).generate(requests):
        audit(half, full, each.tokens, each.prompt_length, rng, result)
        print(result, flush=True)
    return 1 if result.uncertified else 0


if __name__ == "__main__":
    sys.exit(main())
