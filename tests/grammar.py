"""A tiny target that knows a small grammar, trained in seconds: tests of learning need text that can be foretold.

Three domains, with structure at several distances; after the prompt every token is determined:

    count   C 7 10 13 | 16 19 2 5 ...             numbers that go up by 1, 2 or 3, modulo 20
    tale    T 4 9 | the 4 saw 9 . then 9 saw 4 .  a fixed story about the two numbers of the prompt
    sum     S 3 + 4 = 7 ; | 4 + 7 = 1 ; 7 + ...   each the sum of the two before, modulo 10, written out
"""

from __future__ import annotations

import random
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt

NUMBERS = 20
COUNT, TALE, SUM, PLUS, EQUALS, SEMICOLON, THE, SAW, DOT, THEN, AND, BOTH, SLEPT = range(NUMBERS, NUMBERS + 13)
MASK, VOCAB, LENGTH = 39, 40, 33
X, Y = -1, -2
STORY = [THE, X, SAW, Y, DOT, THEN, Y, SAW, THE, X, AND, BOTH, SLEPT, DOT]


def _count(rng: random.Random) -> tuple[list[int], int]:
    start, step = rng.randrange(NUMBERS), rng.randint(1, 3)
    return [COUNT, *((start + i * step) % NUMBERS for i in range(LENGTH - 1))], 4


def _tale(rng: random.Random) -> tuple[list[int], int]:
    x, y = rng.sample(range(NUMBERS), 2)
    return [TALE, x, y, *({X: x, Y: y}.get(word, word) for word in STORY * 3)][:LENGTH], 3


def _sum(rng: random.Random) -> tuple[list[int], int]:
    a, b = rng.randrange(10), rng.randrange(10)
    text = [SUM]
    while len(text) < LENGTH:
        text += [a, PLUS, b, EQUALS, (a + b) % 10, SEMICOLON]
        a, b = b, (a + b) % 10
    return text[:LENGTH], 7


DOMAINS = {"count": _count, "tale": _tale, "sum": _sum}


def sentence(domain: str, seed: int) -> tuple[list[int], int]:
    """A sentence of `LENGTH` tokens, and how many of them are the prompt."""
    return DOMAINS[domain](random.Random(f"{domain} {seed}"))


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts, domains in turn, with the rest of the sentence as recorded response."""
    made = []
    for i in range(count):
        domain = [*DOMAINS][i % len(DOMAINS)]
        text, prompt = sentence(domain, seed * 100_003 + i)
        made.append(Prompt(f"{domain}-{i}", domain, tuple(text[:prompt]), tuple(text[prompt:])))
    return made


@cache
def model(steps: int = 150, seed: int = 0) -> PreTrainedModel:
    """A four-layer Qwen3 that has learnt the grammar; made once a process."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "qwen3", vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=None, eos_token_id=None,
        bos_token_id=None, tie_word_embeddings=False,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(made.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for step in range(steps):
        batch = torch.tensor([sentence([*DOMAINS][i % 3], 1_000_000 + step * 18 + i)[0] for i in range(18)])
        loss = made(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return made.eval()


def target() -> HFTarget:
    """The adapter over that model."""
    return HFTarget(model())
