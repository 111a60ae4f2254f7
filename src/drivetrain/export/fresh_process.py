"""Asks a runtime, in a process of its own, what an export answers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import drivetrain
from drivetrain.errors import RunError
from drivetrain.export.runtimes.exchange import Answered, Asked

LAST_LINES = 12
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class CannotLoad(RunError):
    """The format's own software does not load the export, or fails while it computes."""


def ask(runtime: str, asked: Asked, may_download: bool = False) -> Answered:
    """Returns the runtime's answer. may_download: whether the process may ask the hub, for a base model that is there.

    Raises CannotLoad with the last lines of what the process printed.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-export-") as name:
        folder = Path(name)
        asked.write(folder)
        command = [sys.executable, "-m", f"drivetrain.export.runtimes.{runtime}", str(folder)]
        done = subprocess.run(
            command, env=_environment(may_download), capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
            raise CannotLoad(f"{runtime} ended with {how}:\n" + "\n".join(lines[-LAST_LINES:]))
        return Answered.read(folder)


def _environment(may_download: bool) -> dict[str, str]:
    source = str(Path(drivetrain.__file__).parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    offline = {} if may_download else OFFLINE
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join([source, *others])}
