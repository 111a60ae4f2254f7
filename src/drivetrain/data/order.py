"""The order of the data: a pure function of (seed, step), whatever the number of ranks, workers or micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from drivetrain.data.mixture import Phase, Turns
from drivetrain.data.shares import shares


class Order(Protocol):
    """The samples that each step takes. num_samples: of an epoch, steps_per_epoch: its steps; None and infinite if
    samples are drawn without end and the epochs of a stream flow into one another."""

    @property
    def num_samples(self) -> int | None: ...

    @property
    def steps_per_epoch(self) -> float: ...

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Returns for a step (from 0) (epoch, sample indices of the global batch)."""
        ...

    def drawn_before(self, step: int) -> list[int]:
        """Counts the samples of each data set in the steps before this one; empty if there is no mixture."""
        ...


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
    """The samples that each step takes. Every epoch visits each sample once; its last batch may be smaller.

    parts: with them an epoch takes samples by weight. Over epochs each part is still gone through in whole passes: none
    of its samples comes a third time before all came twice.
    """

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, parts: Sequence[MixturePart] | None = None
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_samples / batch_size)
        self._seed, self._parts = seed, parts
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Returns for a step (from 0) (epoch, sample indices of the global batch)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._of_epoch(epoch)
        start = position * self.batch_size
        return epoch, self._order[start : start + self.batch_size]

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if self._parts is None:
            return _shuffled([self._seed, epoch], self.num_samples)
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
        """Returns the samples of these draws from one part, which is gone through pass after pass."""
        passes = range(draws.start // size, math.ceil(draws.stop / size))
        found = [_shuffled([self._seed, number, turn], size) for turn in passes]
        skipped = draws.start - passes.start * size
        return np.concatenate([np.empty(0, np.int64), *found])[skipped : skipped + len(draws)]

    def drawn_before(self, step: int) -> list[int]:
        if self._parts is None:
            return []
        epoch, position = divmod(step, self.steps_per_epoch)
        counts = np.array(shares(self.num_samples, [part.weight for part in self._parts])) * epoch
        if position:
            taken = self._of_epoch(epoch)[: position * self.batch_size]
            counts = counts + [int(((taken >= part.start) & (taken < part.stop)).sum()) for part in self._parts]
        found: list[int] = counts.tolist()
        return found


class PhasedOrder:
    """A mixture whose weights change at certain steps. Each part is gone through in whole passes, as in GlobalOrder."""

    def __init__(
        self, parts: Sequence[MixturePart], phases: Sequence[Phase], batch_size: int, seed: int, num_samples: int
    ) -> None:
        """num_samples: of an epoch, in which a run's length may be stated."""
        self.num_samples, self.steps_per_epoch = num_samples, math.ceil(num_samples / batch_size)
        self._parts, self._seed = parts, seed
        self._turns = Turns(phases, batch_size, seed, num_samples)
        self._passes: dict[int, tuple[int, np.ndarray]] = {}  # of each part the last pass, and its order

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        sets, draws = self._turns.of_step(step)
        indices = np.empty(len(sets), np.int64)
        for number, part in enumerate(self._parts):
            own = draws[sets == number]
            found = [part.start + self._pass(number, int(draw) // part.size)[int(draw) % part.size] for draw in own]
            indices[sets == number] = found
        return step // self.steps_per_epoch, indices

    def _pass(self, number: int, turn: int) -> np.ndarray:
        held = self._passes.get(number)
        if held is None or held[0] != turn:
            held = self._passes[number] = (turn, _shuffled([self._seed, number, turn], self._parts[number].size))
        return held[1]

    def drawn_before(self, step: int) -> list[int]:
        return self._turns.drawn_before(step)


class DrawnOrder:
    """Samples that are drawn by number from data sets that shuffle themselves, as streams do: draw d of set s has the
    index d * sets + s.

    epoch: samples of one, whose last batch may be smaller; None: epochs flow into one another. phases: the weights of a
    mixture of several sets.
    """

    def __init__(self, phases: Sequence[Phase], batch_size: int, seed: int, epoch: int | None) -> None:
        self.num_samples, self._batch = epoch, batch_size
        self.steps_per_epoch = math.inf if epoch is None else math.ceil(epoch / batch_size)
        self._sets = len(phases[0].weights)
        self._turns = Turns(phases, batch_size, seed, epoch)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        epoch = 0 if self.num_samples is None else int(step // self.steps_per_epoch)
        if self._sets > 1:
            sets, draws = self._turns.of_step(step)
            return epoch, draws * self._sets + sets
        if self.num_samples is None:
            return epoch, np.arange(step * self._batch, (step + 1) * self._batch)
        start = (step - epoch * int(self.steps_per_epoch)) * self._batch
        return epoch, epoch * self.num_samples + np.arange(start, min(start + self._batch, self.num_samples))

    def drawn_before(self, step: int) -> list[int]:
        return self._turns.drawn_before(step) if self._sets > 1 else []


class RepeatedOrder:
    """An order each of whose batches is taken by `uses` steps, one after the other."""

    def __init__(self, order: Order, uses: int) -> None:
        self._order, self._uses = order, uses

    @property
    def num_samples(self) -> int | None:
        return self._order.num_samples

    @property
    def steps_per_epoch(self) -> float:
        return self._order.steps_per_epoch * self._uses

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        return self._order.batch(step // self._uses)

    def drawn_before(self, step: int) -> list[int]:
        return self._order.drawn_before(-(-step // self._uses))


def _shuffled(seed: Sequence[int], size: int) -> np.ndarray:
    return np.random.default_rng(list(seed)).permutation(size)
