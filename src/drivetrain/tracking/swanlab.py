"""Curves in SwanLab, or in files that `swanlab sync` uploads later."""

from __future__ import annotations

import os
import uuid
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import swanlab

from drivetrain.tracking.curves import PROJECT, CurveTracker, has_key, settings_of
from drivetrain.tracking.events import RunStarted

HOSTS = ("api.swanlab.cn", "swanlab.cn")
STATE = {"completed": "success", "stopped_early": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanlabTracker(CurveTracker):
    """Without a key, and without SWANLAB_MODE, the record is kept in the run's folder and nothing is sent.

    Project, workspace, server and mode are SwanLab's own variables: SWANLAB_PROJECT, SWANLAB_WORKSPACE,
    SWANLAB_API_HOST, SWANLAB_MODE.
    """

    service = "swanlab"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run: Any = None

    def begin(self, started: RunStarted, record: str | None) -> str:
        offline = not has_key("SWANLAB_API_KEY", [Path("~/.swanlab/.netrc").expanduser()], HOSTS)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            self._run = swanlab.init(
                project=os.environ.get("SWANLAB_PROJECT", PROJECT),
                name=started.name,
                id=record or uuid.uuid4().hex[:21],
                resume="allow",
                log_dir=str(self.folder / "swanlab"),
                mode="offline" if offline and "SWANLAB_MODE" not in os.environ else None,
                config=settings_of(started),
            )
        return str(self._run.id)

    def add(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, status: str) -> None:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            self._run.finish(state=STATE.get(status, "crashed"))
