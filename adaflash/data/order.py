"""The order of samples as a pure function of (seed, index): which source, which row. Resume at any index is O(1).

Only raw bits of a counter-based generator are used, so the order is the same on every machine and version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CHUNK = 1024  # weights are rounded to 1/1024; every chunk has exactly its share of each source


def _bits(count: int, *key: int) -> np.ndarray:
    """Uniform 64-bit integers [count] that depend on the key alone."""
    return np.random.Philox(np.random.SeedSequence([part & 0xFFFFFFFF for part in key])).random_raw(count)


@lru_cache(maxsize=64)
def permutation(count: int, seed: int, source: int, epoch: int) -> np.ndarray:
    """A shuffle of 0 .. count - 1, fresh in every epoch of every source."""
    return np.argsort(_bits(count, seed, 1, source, epoch), kind="stable")


def quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a chunk: largest remainder, at least one each."""
    if len(weights) > CHUNK:
        raise ValueError(f"at most {CHUNK} sources can be mixed, got {len(weights)}")
    spare = CHUNK - len(weights)  # one each is given away first
    exact = [max(0.0, CHUNK * weight / sum(weights) - 1) for weight in weights]
    scale = spare / sum(exact) if sum(exact) else 0.0
    shares = [part * scale for part in exact]
    counts = [1 + int(share) for share in shares]
    by_rest = sorted(range(len(counts)), key=lambda i: (int(shares[i]) - shares[i], i))
    for i in by_rest[: CHUNK - sum(counts)]:
        counts[i] += 1
    return counts


class Mixer:
    """Which source a sample comes from, and the how-manieth sample of that source it is."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts, self.seed = quotas(weights), seed
        self._chunk: tuple[int, np.ndarray, np.ndarray] | None = None

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, k): sample number `sample` is the k-th of that source."""
        chunk, at = divmod(sample, CHUNK)
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = (chunk, *self._layout(chunk))
        source, nth = int(self._chunk[1][at]), int(self._chunk[2][at])
        return source, chunk * self.counts[source] + nth

    def _layout(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and running number of each sample of a chunk, spread so that any stretch is close to the weights."""
        source = np.repeat(np.arange(len(self.counts)), self.counts)
        nth = np.concatenate([np.arange(count) for count in self.counts])
        jitter = _bits(CHUNK, self.seed, 2, chunk) / 2.0**64
        place = np.argsort((nth + jitter) / np.asarray(self.counts)[source], kind="stable")
        source, nth = source[place], nth[place]
        return source, nth
