"""One cell in a process group of its own, watched from outside and ended beyond its limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from drivetrain.compare.outcome import Outcome
from drivetrain.measure.other_programs import OtherPrograms

LOG = "log.txt"
POLL_SECONDS = 0.5  # looking costs some milliseconds: less than a hundredth of the cell's time


@dataclass(frozen=True)
class Limits:
    """The limits beyond which a cell is ended."""

    timeout_seconds: float | None = None
    resident_bytes: int | None = None  # of its process and their children


@dataclass(frozen=True)
class Glance:
    """A running cell, seen from outside."""

    seconds: float
    resident_bytes: int
    utilisation: float  # processor time over wall time and cores


class CellProcess:
    """The process of the cell whose request lies in a folder."""

    def __init__(self, folder: Path, key: str, limits: Limits) -> None:
        self._folder, self._key, self._limits = folder, key, limits

    def run(
        self,
        glanced: Callable[[Glance], None],
        stopped: Callable[[], bool] = lambda: False,
        environment: Mapping[str, str] | None = None,
        work_folder: Path | None = None,
    ) -> Outcome:
        """Returns how the cell ended, and writes it into the folder. An exception ends the cell and is passed on.

        glanced: called twice a second. stopped: asked as often; True ends the cell. environment, work_folder: of the
        process; None: those of this one.
        """
        start = time.perf_counter()
        with (self._folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "drivetrain.compare.cell", str(self._folder)],
                stdin=subprocess.PIPE,  # its end tells the cell that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to pass on; and a kill reaches loader processes too
                env=environment,
                cwd=work_folder,
            )
            (self._folder / "pid").write_text(str(process.pid))  # for a user who wants to look at it or end it
            others = OtherPrograms()
            try:
                cut = self._watch(process, start, glanced, stopped)
            finally:
                _end(process)
        share = others.share()
        outcome = Outcome.read(self._folder)
        if outcome is None:
            seconds = time.perf_counter() - start
            how = cut or Outcome(key="", status="crashed", reason=self._crash(process.returncode))
            outcome = how.model_copy(update={"key": self._key, "seconds": seconds})
        outcome = outcome.model_copy(update={"foreign_share": share})
        outcome.write(self._folder)
        return outcome

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        start: float,
        glanced: Callable[[Glance], None],
        stopped: Callable[[], bool],
    ) -> Outcome | None:
        """Waits until the process ends or passes a limit; then returns the outcome (without its key)."""
        seen, limits = psutil.Process(process.pid), self._limits
        used, at = 0.0, start
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                return None
            if stopped():
                raise KeyboardInterrupt
            resident, used_now = _family(seen)
            now = time.perf_counter()
            share = (used_now - used) / max(1e-9, now - at) / (psutil.cpu_count() or 1)
            used, at = used_now, now
            glanced(Glance(now - start, resident, min(1.0, max(0.0, share))))
            if limits.timeout_seconds is not None and now - start > limits.timeout_seconds:
                return Outcome(key="", status="timed out", reason=f"cut off after {limits.timeout_seconds:g} s")
            if limits.resident_bytes is not None and resident > limits.resident_bytes:
                taken, allowed = (size / 2**20 for size in (resident, limits.resident_bytes))
                reason = f"cut off at {taken:,.0f} MiB of resident memory; {allowed:,.0f} MiB were allowed"
                return Outcome(key="", status="out of memory", reason=reason)

    def _crash(self, code: int) -> str:
        lines = (self._folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last_line = f": {lines[-1][:200]}" if lines else ""
        if code >= 0:
            return f"the process ended with code {code}{last_line}"
        name = signal.Signals(-code).name
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}{last_line}"


def _family(process: psutil.Process) -> tuple[int, float]:
    """Returns (resident bytes, processor seconds) of a process and its children."""
    resident, used = 0, 0.0
    with contextlib.suppress(psutil.Error):
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error), member.oneshot():
                times = member.cpu_times()
                resident, used = resident + member.memory_info().rss, used + times.user + times.system
    return resident, used


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole group, at once: a half cell is run again, so there is nothing to save."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
