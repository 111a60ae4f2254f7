"""Curves in Trackio: a database under TRACKIO_DIR, which `trackio show` draws."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import trackio

from drivetrain.tracking.curves import PROJECT, CurveTracker, settings_of
from drivetrain.tracking.events import RunStarted


class TrackioTracker(CurveTracker):
    """The project is TRACKIO_PROJECT, or drivetrain. A record's id is its name, which a second run may have too: a new
    one begins then."""

    service = "trackio"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run: Any = None

    def begin(self, started: RunStarted, record: str | None) -> str:
        with redirect_stdout(io.StringIO()):  # stdout holds the run's result
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=record or started.name,
                resume="allow" if record else "never",
                config=settings_of(started),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return str(self._run.name)

    def add(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, status: str) -> None:
        del status  # a record has no outcome
        with redirect_stdout(io.StringIO()):
            self._run.finish()
