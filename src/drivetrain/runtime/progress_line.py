"""A line that says how far work is, for work that neither a run's events nor a tracker show."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

FIRST = 2.0  # seconds, after which work shows its line
CHANGED_EVERY = 0.5  # seconds, on a terminal, which shows one line that changes
SAID_EVERY = 10.0  # seconds, elsewhere


@dataclass(frozen=True)
class Unit:
    """name: of `size` units of the work. announced: on a terminal, work of so many is announced before its rate is
    known."""

    name: str
    size: float
    announced: int
    digits: int  # of rates, behind the point


MEGABYTES = Unit("MB", 1e6, 16 << 20, 1)
SAMPLES = Unit("samples", 1, 1 << 20, 0)


class ProgressLine:
    """A line on stderr that says how far the work is and how long it will take, for work that takes longer than two
    seconds; on a terminal, of much work, at once."""

    def __init__(self, what: str, total: int, done: int = 0, unit: Unit = MEGABYTES) -> None:
        """total, done: units (bytes, samples) of all the work, and of an earlier process's part."""
        self._what, self._all, self._unit = what, total, unit
        self._done = self._before = done
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._every = CHANGED_EVERY if self._terminal else SAID_EVERY
        self._shown = self._terminal and total - done >= unit.announced
        if self._shown:
            print(f"{what}: {self._number(total - done)} {unit.name}", end="", file=sys.stderr, flush=True)

    def add(self, count: int = 1) -> None:
        """Adds finished work."""
        self._done += count
        now = time.monotonic()
        if now - self._last < (self._every if self._shown else FIRST):
            return
        self._last = now
        rate = (self._done - self._before) / (now - self._start)
        remaining = int((self._all - self._done) / rate) if rate else 0
        unit = self._unit
        line = (
            f"{self._what}: {self._number(self._done)} of {self._number(self._all)} {unit.name}, "
            f"{rate / unit.size:,.{unit.digits}f} {unit.name}/s, {remaining // 60} min {remaining % 60} s left"
        )
        print(
            f"\r{line}   " if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True
        )
        self._shown = True

    def reach(self, done: int) -> None:
        """Says how much of all the work is finished."""
        self.add(done - self._done)

    def end(self) -> None:
        """Ends the line, if one was shown."""
        if self._shown and self._terminal:
            print(file=sys.stderr)

    def _number(self, count: int) -> str:
        return f"{count / self._unit.size:,.0f}"
