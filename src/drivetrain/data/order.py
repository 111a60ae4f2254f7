"""The order of the data: a pure function of (seed, step), whatever the number of ranks, workers or micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MixturePart:
    """Samples of one data set in a mixture: `stop - start` of them, and its share of each epoch's samples."""

    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        return self.stop - self.start


class GlobalOrder:
    """Which samples each step takes. Every epoch visits each sample once; its last batch may be smaller.

    parts: with them an epoch is as long, but takes samples by weight. Over epochs each part is still gone through in
    whole passes: none of its samples comes a third time before all came twice.
    buffer: shuffle within so many neighbours only, as a stream must.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        parts: Sequence[MixturePart] | None = None,
        buffer: int | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_samples / batch_size)
        self._seed, self._parts, self._buffer = seed, parts, buffer
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Step (from 0) → (epoch, sample indices of the global batch)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._of_epoch(epoch)
        start = position * self.batch_size
        return epoch, self._order[start : start + self.batch_size]

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if self._parts is None:
            return self._shuffled([self._seed, epoch], self.num_samples)
        counts = shares(self.num_samples, [part.weight for part in self._parts])
        turns = np.repeat(np.arange(len(counts)), counts)
        np.random.default_rng([self._seed, epoch]).shuffle(turns)
        order = np.empty(self.num_samples, np.int64)
        for number, (part, count) in enumerate(zip(self._parts, counts, strict=True)):
            order[turns == number] = part.start + self._drawn(
                number, part.size, range(epoch * count, (epoch + 1) * count)
            )
        return order

    def _drawn(self, number: int, size: int, draws: range) -> np.ndarray:
        """The given draws from one part, which is gone through pass after pass."""
        passes = range(draws.start // size, math.ceil(draws.stop / size))
        found = [self._shuffled([self._seed, number, turn], size) for turn in passes]
        skipped = draws.start - passes.start * size
        return np.concatenate([np.empty(0, np.int64), *found])[skipped : skipped + len(draws)]

    def _shuffled(self, seed: Sequence[int], size: int) -> np.ndarray:
        generator = np.random.default_rng(list(seed))
        if self._buffer is None or self._buffer >= size:
            return generator.permutation(size)
        starts = range(0, size, self._buffer)
        return np.concatenate([start + generator.permutation(min(self._buffer, size - start)) for start in starts])


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the weights as whole numbers can be (largest remainders)."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    found = np.floor(exact).astype(int)
    for number in np.argsort(found - exact, kind="stable")[: total - int(found.sum())]:
        found[number] += 1
    return [int(count) for count in found]
