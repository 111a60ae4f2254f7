"""Samples a second, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds spent in named parts; parts do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Throughput:
    """Steady rate over all steps that count as steady, and the rate since it was last asked for."""

    def __init__(self) -> None:
        self._steady_samples = self._recent_samples = 0
        self._steady_seconds = self._recent_seconds = 0.0

    def add(self, samples: int, seconds: float, steady: bool) -> None:
        """steady: not a first, instrumented or otherwise untypical step."""
        self._recent_samples += samples
        self._recent_seconds += seconds
        if steady:
            self._steady_samples += samples
            self._steady_seconds += seconds

    def recent(self) -> float:
        """Samples a second since the last call; 0 if there was no step."""
        rate = self._recent_samples / self._recent_seconds if self._recent_seconds else 0.0
        self._recent_samples, self._recent_seconds = 0, 0.0
        return rate

    def steady_rate(self) -> float | None:
        """Samples a second over the steady steps; None if there was none."""
        return self._steady_samples / self._steady_seconds if self._steady_seconds else None
