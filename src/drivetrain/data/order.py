"""The order of the data: a pure function of (seed, step), whatever the number of ranks, workers or micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import numpy as np

POOL_BATCHES = 50  # batches whose samples are sorted by length together: enough to pad little, few enough to stay mixed


class GlobalOrder:
    """Which samples each step takes. Every epoch visits each sample once; its last batch may be smaller."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, lengths: Sequence[int] | None = None) -> None:
        """lengths: of each sample, if samples of like length are to share a batch."""
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_samples / batch_size)
        self._seed = seed
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def copy(self) -> GlobalOrder:
        """The same order, read independently."""
        return copy(self)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Step (from 0) → (epoch, sample indices of the global batch)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._deal(epoch)
        return epoch, self._batches[position]

    def _deal(self, epoch: int) -> list[np.ndarray]:
        generator = np.random.default_rng([self._seed, epoch])
        order = generator.permutation(self.num_samples)
        if self._lengths is None:
            return self._cut(order)
        pool = POOL_BATCHES * self.batch_size
        pools = (order[start : start + pool] for start in range(0, len(order), pool))
        # the sort is stable, so that equal lengths keep the permutation's order
        grouped = np.concatenate([part[np.argsort(self._lengths[part], kind="stable")] for part in pools])
        batches = self._cut(grouped)
        return [batches[i] for i in generator.permutation(len(batches))]

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]


def rank_share(indices: np.ndarray, data_rank: int, data_world: int) -> np.ndarray:
    """The samples of a global batch that one data rank takes: every world-th one, so that lengths spread evenly."""
    return indices[data_rank::data_world]


def micro_batches(indices: np.ndarray, micro_batch_size: int) -> list[np.ndarray]:
    """A rank's share in pieces of near-equal size, none above micro_batch_size."""
    return np.array_split(indices, math.ceil(len(indices) / micro_batch_size)) if len(indices) else []
