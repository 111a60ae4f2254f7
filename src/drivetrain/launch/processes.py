"""The processes of ranks, as their machine sees them: the state of each, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil

from drivetrain.launch.diagnostics.hang_report import State
from drivetrain.runtime.heartbeat import Pulse

SILENT_SECONDS = 5  # without a beat
_STATES: dict[str, State] = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "traced",
    psutil.STATUS_DISK_SLEEP: "disk",
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
}


def state_of(pulse: Pulse, unbeaten: float = 0.0) -> State:
    """Returns the state of a rank's process. unbeaten: seconds since its last beat."""
    try:
        status = psutil.Process(pulse.process).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in _STATES and (status != psutil.STATUS_DISK_SLEEP or unbeaten > SILENT_SECONDS):
        return _STATES[status]
    return "silent" if unbeaten > SILENT_SECONDS else "waits"


def kill(ranks: Iterable[Pulse]) -> None:
    """Kills ranks that this process has started: a stopped one reacts to no other signal."""
    for pulse in ranks:
        with suppress(psutil.Error, ProcessLookupError):
            if psutil.Process(pulse.process).ppid() == os.getpid():
                os.kill(pulse.process, signal.SIGKILL)
