"""Memory of a measurement's process."""

from __future__ import annotations

from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")


class Resident:
    """What a process takes from now on; libraries that are imported before do not count."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    def added(self) -> int:
        """Bytes that the peak lies above where this began.

        The peak is the kernel's VmHWM of this program; getrusage's would begin at what the bench that started it holds.
        """
        peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return max(0, int(peak.split()[1]) * 1024 - self._before)
