"""Runs the cells one after another, each in a process group of its own, and reports how each ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import psutil
from filelock import FileLock, Timeout

from drivetrain.compare.busy import OtherPrograms
from drivetrain.compare.cell import REQUEST, Request
from drivetrain.compare.matrix import Cell, Job, Matrix
from drivetrain.compare.outcome import Outcome
from drivetrain.errors import problem

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


class Listener(Protocol):
    """Receives events as the matrix fills."""

    def started(self, cell: Cell) -> None: ...

    def glanced(self, cell: Cell, glance: Glance) -> None: ...

    def ended(self, cell: Cell, outcome: Outcome, kept: bool) -> None:
        """Called when a cell has ended. kept: its result is from an earlier start."""


class Again(Enum):
    """Selects which cells of an earlier start are run again."""

    UNFINISHED = "unfinished"
    FAILED = "failed"  # and those that did not complete
    ALL = "all"


def run_matrix(matrix: Matrix, root: Path, limits: Limits, again: Again, listener: Listener) -> list[Outcome]:
    """Returns outcomes in the order of the cells. Cells of one key are one run, which is made once.

    KeyboardInterrupt ends the running cell and is passed on; finished ones stay.
    """
    outcomes: list[Outcome] = []
    done: set[str] = set()
    with _alone(root):
        for cell in matrix.cells:
            outcomes.append(_one(cell, matrix.job, limits, Again.UNFINISHED if cell.key in done else again, listener))
            done.add(cell.key)
    return outcomes


def _one(cell: Cell, job: Job, limits: Limits, again: Again, listener: Listener) -> Outcome:
    if cell.run is None:
        reason = "; ".join(f"{found.field}: {found.why}" for found in cell.problems)
        outcome = Outcome(key="", status="refused", reason=reason)
        listener.ended(cell, outcome, kept=False)
        return outcome
    earlier = None if again is Again.ALL else Outcome.read(cell.folder)
    if earlier is not None and earlier.key == cell.key and (again is not Again.FAILED or earlier.status == "completed"):
        listener.ended(cell, earlier, kept=True)
        return earlier
    listener.started(cell)
    shutil.rmtree(cell.folder, ignore_errors=True)
    cell.folder.mkdir(parents=True)
    request = Request(key=cell.key, verb=job.verb, run=cell.run, checkpoint=job.checkpoint, plan=job.plan)
    (cell.folder / REQUEST).write_text(request.model_dump_json(indent=1) + "\n", encoding="utf-8")
    outcome = _in_a_process(cell, limits, lambda glance: listener.glanced(cell, glance))
    listener.ended(cell, outcome, kept=False)
    return outcome


def _in_a_process(cell: Cell, limits: Limits, glanced: Callable[[Glance], None]) -> Outcome:
    start = time.perf_counter()
    with (cell.folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.compare.cell", str(cell.folder)],
            stdin=subprocess.PIPE,  # its end tells the cell that we are gone
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on; and a kill reaches loader processes too
        )
        (cell.folder / "pid").write_text(str(process.pid))  # for a user who wants to look at it or end it
        others = OtherPrograms()
        try:
            cut = _watch(process, limits, start, glanced)
        finally:
            _end(process)
    share = others.share()
    outcome = Outcome.read(cell.folder)
    if outcome is None:
        seconds = time.perf_counter() - start
        how = cut or Outcome(key="", status="crashed", reason=_crash(process.returncode, cell))
        outcome = how.model_copy(update={"key": cell.key, "seconds": seconds})
    outcome = outcome.model_copy(update={"foreign_share": share})
    outcome.write(cell.folder)
    return outcome


def _watch(
    process: subprocess.Popen[bytes], limits: Limits, start: float, glanced: Callable[[Glance], None]
) -> Outcome | None:
    """Waits until the process ends or passes a limit; then returns the outcome (without its key)."""
    seen = psutil.Process(process.pid)
    used, at = 0.0, start
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return None
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


def _crash(code: int, cell: Cell) -> str:
    lines = (cell.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last_line = f": {lines[-1][:200]}" if lines else ""
    if code >= 0:
        return f"the process ended with code {code}{last_line}"
    name = signal.Signals(-code).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}{last_line}"


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Raises UserError if another comparison works in the folder. The lock ends with the process."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise problem("--output", f"another comparison is running in {root}", "wait for it, or give another") from None
    except OSError as error:
        raise problem("--output", f"{root} cannot be written: {error.strerror}", "give another folder") from None
    try:
        yield
    finally:
        lock.release()
