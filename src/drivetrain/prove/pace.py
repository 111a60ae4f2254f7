"""Reports how far a trace is, and estimates how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_SECONDS = 5.0


class Pace:
    """Takes a step at a time; the first step is left out of the estimate, since it warms up."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        """total: number of steps. say: receives a line, at most one every EVERY_SECONDS."""
        self._total, self._say, self._clock = total, say, clock
        self._done = 0
        self._first = self._reported = clock()

    def step_done(self) -> None:
        self._done += 1
        now = self._clock()
        if self._done == 1:
            self._first = now
        elif self._done < self._total and now - self._reported >= EVERY_SECONDS:
            self._reported = now
            left = (now - self._first) / (self._done - 1) * (self._total - self._done)
            self._say(f"  step {self._done} of {self._total}, about {_duration(left)} left of this part")


def _duration(seconds: float) -> str:
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
