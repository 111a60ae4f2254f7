"""Memory of a command and all processes that it starts: the sum of proportional shares, so that pages which several map
count once (Pss of /proc/PID/smaps_rollup)."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY = 0.5  # seconds; a process waits while its maps are looked at


@dataclass(frozen=True)
class Measured:
    """seconds: until `ended` was true, or the command ended. cpu_seconds: of it and its processes, user and system.
    peak_bytes: largest sum of proportional shares; anonymous_bytes: the part of it that no file backs."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    anonymous_bytes: int
    returncode: int


def watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    ended: Callable[[], bool] = lambda: False,
    limit: float = 3600,
) -> Measured:
    """Runs the command and looks at its memory until it ends, or kills it when `ended` is true or the time is over."""
    start, peak, anonymous = time.monotonic(), 0, 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("w") as out:
        child = subprocess.Popen(
            command, env=dict(environment), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while child.poll() is None and not ended() and time.monotonic() - start < limit:
                total, own = shares(child.pid)
                peak, anonymous = max(peak, total), max(anonymous, own)
                time.sleep(EVERY)
            seconds = time.monotonic() - start
        finally:
            killed = child.poll() is None
            below = processor_seconds(
                child.pid
            )  # which a killed parent does not wait for, so that they are not its own
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, cpu + below, peak, anonymous, 0 if killed and ended() else child.returncode)


def processor_seconds(pid: int) -> float:
    """Returns those of all running processes below this one, and of their children that have ended."""
    found = 0.0
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += sum(process.cpu_times()[:4])
    return found


def shares(pid: int) -> tuple[int, int]:
    """Bytes of the process and all below it: proportional shares, and of these the anonymous ones."""
    total = own = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(OSError, psutil.NoSuchProcess):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if name in {"Pss", "Pss_Anon"}:
                        size = int(rest.split()[0]) * 1024
                        total += size if name == "Pss" else 0
                        own += size if name == "Pss_Anon" else 0
    return total, own
