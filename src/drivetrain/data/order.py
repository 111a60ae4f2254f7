"""The order of the data: a pure function of (seed, step), whatever the number of ranks, workers or micro-batches."""

from __future__ import annotations

import math

import numpy as np


class GlobalOrder:
    """Which samples each step takes. Every epoch visits each sample once; its last batch may be smaller."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_samples / batch_size)
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Step (from 0) → (epoch, sample indices of the global batch)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_samples)
        start = position * self.batch_size
        return epoch, self._order[start : start + self.batch_size]
