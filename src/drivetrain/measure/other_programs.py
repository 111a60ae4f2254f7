"""Measures how much processor time other programs take meanwhile: one busy thread can slow a run that computes on all
cores several times over."""

from __future__ import annotations

import resource
import time

import psutil


class OtherPrograms:
    """The work of all processes but this one and the children that it has waited for, since the start."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()

    def share(self) -> float:
        """Returns their share of the machine's processor time, stolen time included. Call it once the children that
        count as own work have been waited for."""
        return min(1.0, self.cores() / (psutil.cpu_count() or 1))

    def cores(self) -> float:
        """Returns how many cores they took on average; call it as `share`."""
        elapsed = time.perf_counter() - self._start
        foreign = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        return max(0.0, foreign / elapsed)


def busy_seconds() -> float:
    """Returns the processor time of all programs since the machine started."""
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - guest)


def own_seconds() -> float:
    """Returns the processor time of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
