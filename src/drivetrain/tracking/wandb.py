"""Curves at Weights & Biases, or in files that `wandb sync` uploads later."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from drivetrain.tracking.curves import PROJECT, CurveTracker, has_key, settings_of
from drivetrain.tracking.events import RunStarted


class WandbTracker(CurveTracker):
    """Without a key, and without WANDB_MODE, the record is kept in the run's folder and nothing is sent.

    Project, entity, server and mode are W&B's own variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE.
    """

    service = "wandb"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run: Any = None

    def begin(self, started: RunStarted, record: str | None) -> str:
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        offline = not has_key("WANDB_API_KEY", [Path("~/.netrc").expanduser()], [host])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=started.name,
            id=record or uuid.uuid4().hex[:12],
            resume="allow",
            dir=str(self.folder),
            mode="offline" if offline and "WANDB_MODE" not in os.environ else None,
            config=settings_of(started),
            # its lines would run through the progress bar; the events of the run are on the screen already
            settings=wandb.Settings(silent=True, console="off"),
        )
        return str(self._run.id)

    def add(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)
