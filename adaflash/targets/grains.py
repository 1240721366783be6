"""How many keys attention reads, so that a row's bits do not depend on how many others are read with it.

In bfloat16 a CPU's attention goes over the keys in chunks, and orders the sums within the last one by its length; on some
machines lengths of 256 and 320 are summed otherwise than all others. Keys behind a row weigh exactly nothing, so more
of them may be read: up to the next length that this machine sums as it sums a whole chunk.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

GRAIN = 64  # a multiple of every vector's width
CHUNK = 512  # keys that torch's CPU kernel takes at once


def whole(length: int, dtype: torch.dtype, device: torch.device) -> int:
    """Keys to read where a row sees at most `length` of them: `length` itself where no bits depend on it."""
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return length
    chunks, rest = divmod(length, CHUNK)
    return chunks * CHUNK + (min(each for each in agreeing() if each >= rest) if rest else 0)


@cache
def agreeing() -> tuple[int, ...]:
    """Lengths <= CHUNK in whole grains that this machine sums as it sums a whole chunk, found by trying (milliseconds).

    Rows that weigh all keys alike, over values that cancel: what is left is rounding alone, and shows any other order.
    """
    lengths = range(GRAIN, CHUNK + 1, GRAIN)
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.zeros(1, 2, 4, GRAIN), torch.zeros(1, 2, CHUNK, GRAIN)
    agree = set(lengths)
    for seen in lengths:
        half = torch.randn(1, 2, seen // 2, GRAIN, generator=draw)
        half *= torch.exp2(torch.randint(-8, 8, (1, 2, seen // 2, 1), generator=draw))
        values = torch.cat([half, -half[:, :, torch.randperm(seen // 2, generator=draw)], keys[:, :, seen:]], dim=2)
        mask = torch.zeros(4, CHUNK).index_fill_(1, torch.arange(seen, CHUNK), float("-inf"))
        q, k, v, m = (each.bfloat16() for each in (query, keys, values, mask))
        results = {
            n: F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], attn_mask=m[:, :n])
            for n in lengths
            if n >= seen
        }
        agree -= {n for n, result in results.items() if not torch.equal(result, results[CHUNK])}
    return tuple(sorted(agree))
