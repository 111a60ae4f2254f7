"""Draws from a mixture of data sets: the length of an epoch, the share of each set, and the set of each sample.

Shares are whole numbers in each *round* of at most 65,536 samples, whose order is then shuffled; the rounding error of
a set is carried into the next round. A round ends with its epoch, and where weights change. All of it is a pure
function of (seed, step), whatever the number of ranks, workers or micro-batches.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.data.shares import shares

ROUND = 1 << 16  # samples
TURNS = 1  # in seeds, beside other draws by (seed, number)


@dataclass(frozen=True)
class Phase:
    """weights: share of each set in the samples from step `start` (from 0) on."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Epoch:
    """An epoch. samples: its length. counts: of each set among them."""

    samples: int
    counts: tuple[int, ...]


def epoch_of(
    sizes: Sequence[int],
    weights: Sequence[float],
    mix: str,
    most_passes: Sequence[float | None] | None = None,
) -> Epoch:
    """Returns the epoch. sizes: samples of each set. mix: "concat", as many samples as there are; "interleave_under",
    until the first set is through; "interleave_over", until each set was gone through at least once (LLaMA-Factory's
    mix_strategy).

    most_passes: how often an epoch may go through each set at most; the excess of a set's weight goes to the others by
    their weights, and an epoch is shorter where all are at their bound.
    """
    total = sum(weights)
    times = [size * total / weight for size, weight in zip(sizes, weights, strict=True) if weight > 0]
    samples = {"concat": sum(sizes), "interleave_under": math.floor(min(times) + 1e-9)}.get(mix)
    if samples is None:
        samples = math.ceil(max(times) - 1e-9)
    bounds = [
        math.inf if most is None else math.floor(most * size)
        for most, size in zip(most_passes or [None] * len(sizes), sizes, strict=True)
    ]
    counts = _within(max(1, samples), weights, bounds)
    return Epoch(sum(counts), tuple(counts))


def _within(samples: int, weights: Sequence[float], bounds: Sequence[float]) -> list[int]:
    """Returns whole shares of the samples, none above its bound."""
    free = [number for number, weight in enumerate(weights) if weight > 0]
    counts, left = [0] * len(weights), samples
    while free and left:
        wanted = dict(zip(free, shares(left, [weights[number] for number in free]), strict=True))
        full = [number for number in free if wanted[number] >= bounds[number]]
        if not full:
            for number, count in wanted.items():
                counts[number] = count
            break
        for number in full:
            counts[number] = int(bounds[number])
            left -= counts[number]
        free = [number for number in free if number not in full]
    return counts


def phases_of(schedules: Sequence[Mapping[int, float]]) -> list[Phase]:
    """Returns the phases. schedules: for each set, its weight from each step on; all have one for step 0."""
    starts = sorted({start for each in schedules for start in each})
    return [
        Phase(start, tuple(each[max(own for own in each if own <= start)] for each in schedules)) for start in starts
    ]


@dataclass(frozen=True)
class Round:
    """Steps first to stop - 1. before: samples drawn of each set until then; begun: until its phase began."""

    first: int
    stop: int
    counts: np.ndarray
    before: np.ndarray
    begun: np.ndarray


class Turns:
    """Maps a step to the set of each of its samples, and the number of the draw from that set.

    epoch: samples after which a batch may be smaller, so that the next epoch begins with a step; None where epochs flow
    into one another.
    """

    def __init__(self, phases: Sequence[Phase], batch_size: int, seed: int, epoch: int | None) -> None:
        self._phases, self._batch, self._seed, self._epoch = phases, batch_size, seed, epoch
        self._rounds: list[Round] = []
        self._firsts: list[int] = []  # first step of each
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None  # a round's number, sets and draws

    def of_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for a step (from 0) sets: (B,), draws: (B,), int64."""
        number = self._round(step)
        if self._drawn is None or self._drawn[0] != number:
            self._drawn = (number, *self._of_round(number))
        start = (step - self._rounds[number].first) * self._batch
        _, sets, draws = self._drawn
        return sets[start : start + self._batch], draws[start : start + self._batch]

    def drawn_before(self, step: int) -> list[int]:
        """Counts the samples of each set in the steps before this one."""
        found = self._rounds[self._round(step)]
        sets, _ = self._of_round(self._round(step))
        part = sets[: (step - found.first) * self._batch]
        counts: list[int] = (found.before + np.bincount(part, minlength=len(found.before))).tolist()
        return counts

    def _round(self, step: int) -> int:
        while not self._rounds or self._rounds[-1].stop <= step:
            self._rounds.append(self._next())
            self._firsts.append(self._rounds[-1].first)
        return bisect.bisect_right(self._firsts, step) - 1

    def _next(self) -> Round:
        """Returns the next round. Shares carry over their fractions, as long as weights stay: a small set gets its
        turns too."""
        last = self._rounds[-1] if self._rounds else None
        first = 0 if last is None else last.stop
        zero = np.zeros(len(self._phases[0].weights), np.int64)
        before = zero if last is None else last.before + last.counts
        number = max(number for number, each in enumerate(self._phases) if each.start <= first)
        begun = before if last is None or last.first < self._phases[number].start else last.begun
        stop, samples = self._extent(first, number)
        weights = np.asarray(self._phases[number].weights, dtype=np.float64)
        drawn = before - begun
        owed = (int(drawn.sum()) + samples) * weights / weights.sum() - drawn
        return Round(first, stop, _whole(owed, samples), before, begun)

    def _extent(self, first: int, phase: int) -> tuple[int, int]:
        """Returns the step behind a round, and the samples in it."""
        stop = first + max(1, ROUND // self._batch)
        if phase + 1 < len(self._phases):
            stop = min(stop, self._phases[phase + 1].start)
        if self._epoch is None:
            return stop, (stop - first) * self._batch
        steps = math.ceil(self._epoch / self._batch)
        end = (first // steps + 1) * steps
        if stop < end:
            return stop, (stop - first) * self._batch
        return end, (end - first) * self._batch - (steps * self._batch - self._epoch)

    def _of_round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._rounds[number]
        sets = np.repeat(np.arange(len(found.counts)), found.counts)
        np.random.default_rng([self._seed, number, TURNS]).shuffle(sets)
        draws = np.empty(len(sets), np.int64)
        for each, (before, count) in enumerate(zip(found.before, found.counts, strict=True)):
            draws[sets == each] = np.arange(before, before + count)
        return sets, draws


def _whole(owed: np.ndarray, total: int) -> np.ndarray:
    """Returns whole numbers of at least 0 that add up to the total, near to the fractions."""
    counts = np.floor(np.maximum(owed, 0.0) + 1e-9).astype(np.int64)
    while (lacking := total - int(counts.sum())) != 0:
        order = np.argsort(counts - owed, kind="stable")
        if lacking > 0:
            counts[order[:lacking]] += 1
        else:
            most = [number for number in order[::-1] if counts[number] > 0]
            counts[most[:-lacking]] -= 1
    return counts
