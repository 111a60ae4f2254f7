"""The child's half of a lockstep (see lockstep.py): do some steps, say how long they took, wait for the next turn.

drivetrain takes turns through a tracker, which users may add to any run; a plain loop calls `take` itself.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from drivetrain.tracking.events import Event, StepDone, Tracker

VARIABLE = "BENCH_TURNS"  # file descriptors of two pipes: "read,write"
TRACKER = "turns:TurnTracker"


class Turns:
    def __init__(self) -> None:
        self._read, self._write = map(int, os.environ[VARIABLE].split(","))
        self._start = self._used = 0.0

    def take(self, step: int) -> None:
        """The turn ends after `step`; returns when the next one begins."""
        turn = {"step": step, "seconds": time.perf_counter() - self._start, "used": time.process_time() - self._used}
        os.write(self._write, json.dumps(turn).encode() + b"\n")
        if not os.read(self._read, 1):
            raise RuntimeError("the bench went away")
        self._start, self._used = time.perf_counter(), time.process_time()


class TurnTracker(Tracker):
    """Named last among the trackers, so that what the others do with a point lies within the turn."""

    def __init__(self, folder: Path) -> None:  # noqa: ARG002 (drivetrain makes every tracker with it)
        self._turns = Turns()

    def handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._turns.take(event.step)

    def close(self) -> None:
        """Nothing to close: the pipes are the bench's."""
