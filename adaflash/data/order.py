"""The order of samples as a pure function of (seed, index): which source, which row. Resume at any index is O(1).

Only raw bits of a counter-based generator are used, so the order is the same on every machine and version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adaflash.errors import UserError

CHUNK = 1024  # weights are rounded to 1/1024; every chunk has exactly its share of each source
Ints = NDArray[np.int64]


def _bits(count: int, *key: int) -> NDArray[np.uint64]:
    """Uniform 64-bit integers [count] that depend on the key alone."""
    seed = np.random.SeedSequence([part & 0xFFFFFFFF for part in key])
    return np.asarray(np.random.Philox(seed).random_raw(count), dtype=np.uint64)


class Shuffle:
    """Endless shuffled numbers 0 .. count - 1: every epoch has each of them once, in an order of its own."""

    def __init__(self, count: int, seed: int, source: int) -> None:
        self.count, self.seed, self.source = count, seed, source
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, k: int, step: int = 0) -> int:
        """The k-th number; `step` looks that much further within the same epoch, round and round."""
        epoch, at = divmod(k, self.count)
        if epoch != self._epoch:
            bits = _bits(self.count, self.seed, 1, self.source, epoch)
            self._epoch, self._order = epoch, np.argsort(bits, kind="stable")
        return int(self._order[(at + step) % self.count])


class Mixer:
    """Which source a sample comes from, and the how-manieth sample of that source it is.

    Args:
        weights: Share of each source, in any unit.
        seed: Of the order in which sources take turns.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts, self.seed = quotas(weights), seed
        self._chunk, self._sources, self._nths = -1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, k): sample number `sample` is the k-th of that source."""
        chunk, at = divmod(sample, CHUNK)
        if chunk != self._chunk:
            self._chunk, (self._sources, self._nths) = chunk, self._layout(chunk)
        source = int(self._sources[at])
        return source, chunk * self.counts[source] + int(self._nths[at])

    def samples(self, wanted: Sequence[int]) -> int:
        """How many samples it takes until every source has given as many as wanted."""
        chunks = min(need // count for need, count in zip(wanted, self.counts, strict=True))
        number, left = chunks * CHUNK, [need - chunks * count for need, count in zip(wanted, self.counts, strict=True)]
        while max(left) > 0:
            left[self.locate(number)[0]] -= 1
            number += 1
        return number

    def _layout(self, chunk: int) -> tuple[Ints, Ints]:
        """Source and running number of each sample of a chunk, spread so that any stretch is close to the weights."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        nths = np.concatenate([np.arange(count) for count in self.counts])
        jitter = _bits(CHUNK, self.seed, 2, chunk) / 2.0**64
        place = np.argsort((nths + jitter) / np.asarray(self.counts)[sources], kind="stable")
        return sources[place], nths[place]


def quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a chunk: largest remainder, at least one each."""
    if len(weights) > CHUNK:
        raise UserError(f"data.train: at most {CHUNK} sources can be mixed, got {len(weights)}")
    wanted = [max(0.0, CHUNK * weight / sum(weights) - 1) for weight in weights]  # one each is given first
    scale = (CHUNK - len(weights)) / sum(wanted) if sum(wanted) else 0.0
    shares = [part * scale for part in wanted]
    counts = [1 + int(share) for share in shares]
    by_rest = sorted(range(len(counts)), key=lambda i: (int(shares[i]) - shares[i], i))
    for i in by_rest[: CHUNK - sum(counts)]:
        counts[i] += 1
    return counts
