"""Samples a second, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.runtime.heartbeat import Heart

MOST_PENDING = 500  # parts whose end the device has not been asked for yet


class Stopwatch:
    """Seconds spent in named parts; parts do not nest.

    A GPU works behind the program: there a part lasts from when the device reaches its beginning to when it reaches its
    end, waiting included, measured by CUDA's events.
    """

    def __init__(self, device: torch.device, heart: Heart | None = None) -> None:
        """heart: the record that notes which part the program is in."""
        self.heart = heart or Heart()
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._reported: dict[str, float] = {}  # as they were at the last call of `recent`
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = self.heart.enter(name)
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._pending.append((name, begin, end))
                self.heart.enter(before)
            if len(self._pending) >= MOST_PENDING:
                self._collect(wait=False)
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)
            self.heart.enter(before)

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds by part. Waits for the device."""
        self._collect(wait=True)
        return dict(self._seconds)

    def recent(self) -> dict[str, float]:
        """Returns the seconds by part since the last call. Does not wait: a part that the device has not ended counts
        next time."""
        self._collect(wait=False)
        before, self._reported = self._reported, dict(self._seconds)
        found = {name: seconds - before.get(name, 0.0) for name, seconds in self._reported.items()}
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def _collect(self, wait: bool) -> None:
        while self._pending:
            name, begin, end = self._pending[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._add(name, begin.elapsed_time(end) / 1000)
            del self._pending[0]

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class Throughput:
    """The steady rate over all steps that count as steady, and the rate since the last call of `recent`."""

    def __init__(self) -> None:
        self._steady_samples = self._recent_samples = 0
        self._steady_seconds = self._recent_seconds = 0.0

    def add(self, samples: int, seconds: float, steady: bool) -> None:
        """Adds a step. steady: not a first, instrumented or otherwise untypical one."""
        self._recent_samples += samples
        self._recent_seconds += seconds
        if steady:
            self._steady_samples += samples
            self._steady_seconds += seconds

    def recent(self) -> float:
        """Returns the samples a second since the last call; 0 if there was no step."""
        rate = self._recent_samples / self._recent_seconds if self._recent_seconds else 0.0
        self._recent_samples, self._recent_seconds = 0, 0.0
        return rate

    def steady_rate(self) -> float | None:
        """Returns the samples a second over the steady steps; None if there was none."""
        return self._steady_samples / self._steady_seconds if self._steady_seconds else None
