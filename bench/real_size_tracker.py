"""A tracker that notes, after each step, the time and what this rank's process has held at most."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from memory import STATUS

from drivetrain.tracking.events import Event, StepDone, Tracker

VARIABLE = "BENCH_STEPS"  # the file that is appended to


def note(step: int, loss: float) -> None:
    """Append a step to the file. Seconds are of the monotonic clock; peak is the kernel's, in bytes."""
    peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    noted = {"step": step, "seconds": time.monotonic(), "peak": int(peak.split()[1]) * 1024, "loss": loss}
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(noted) + "\n")


class StepTracker(Tracker):
    def __init__(self, folder: Path) -> None:
        """folder: drivetrain gives it to every tracker."""

    def handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            note(event.step, event.loss)

    def close(self) -> None:
        """Nothing to close."""
