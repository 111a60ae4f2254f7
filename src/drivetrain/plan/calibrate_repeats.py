"""Measures a figure again that other programs disturbed, by the processor time that they took meanwhile.

A busy program does more than take its share of a core: an operation on several threads waits for the slowest of them,
whose core the scheduler may give back only after milliseconds, where the operation takes microseconds. The calls of a
figure follow each other within a fraction of a second, in which all of them may be disturbed, and so is their lower
quartile (calibration.usual).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from drivetrain.measure.other_programs import busy_seconds, own_seconds

DISTURBED = 0.2  # cores that other programs took; the kernel counts in 10 ms, of which idle machines have some too
TRIES = 6
EXTRA_SECONDS = 0.4  # for further tries of a figure: there are some hundred figures

Everyone = Callable[[float], Sequence[float]]


class Reading(NamedTuple):
    """A moment, and the processor time of all programs and of this one so far, in seconds."""

    clock: float
    busy: float
    own: float


def read() -> Reading:
    return Reading(time.perf_counter(), busy_seconds(), own_seconds())


class Repeats:
    """Measures figures, in one process or in several at the same time, which try a figure equally often."""

    def __init__(self, everyone: Everyone, reading: Callable[[], Reading] = read) -> None:
        """everyone: returns the numbers that the processes pass, and so waits for all of them."""
        self._everyone, self._reading = everyone, reading

    def largest(self, number: float) -> float:
        """Returns the largest of the numbers that the processes pass."""
        return max(self._everyone(number))

    def shortest(self, measure: Callable[[], float], extra_seconds: float = EXTRA_SECONDS) -> float:
        """Returns seconds that `measure` returns: its first ones if no other program disturbed it, else the shortest of
        several tries, since other programs only make calls longer. extra_seconds: for further
        tries; one that would need more is not made.
        """
        found: list[float] = []
        extra = 0.0
        while True:
            foreign, took = self._tried(measure, found)
            extra += took if len(found) > 1 else 0.0
            if foreign <= DISTURBED * took or len(found) == TRIES or extra + took > extra_seconds:
                return min(found)

    def _tried(self, measure: Callable[[], float], found: list[float]) -> tuple[float, float]:
        """Adds a figure. Returns the processor time that other programs took meanwhile, and the seconds that the try
        took; both are the same in all processes."""
        self._everyone(0.0)  # all begin at once
        before = self._reading()
        found.append(measure())
        self._everyone(0.0)  # what a slower process still does is not another program's work
        after = self._reading()
        took = self.largest(after.clock - before.clock)
        own = sum(self._everyone(after.own - before.own))
        return self.largest(after.busy - before.busy - own), took
