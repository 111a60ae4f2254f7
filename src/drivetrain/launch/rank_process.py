"""One rank in a process of its own, held by an actor on its machine: started, watched and ended from elsewhere.

The same process as under torch elastic, `python -m drivetrain.launch.rank`, with the same environment. Only texts and
numbers travel. A moment travels as seconds before now, since machines have clocks of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from drivetrain.launch.diagnostics.hang_report import Row
from drivetrain.launch.diagnostics.process_state import Standing
from drivetrain.launch.diagnostics.stack_request import ask, pulse_file, pulses
from drivetrain.launch.elastic import environment_of_ranks
from drivetrain.launch.job import Job
from drivetrain.launch.outcome import outcomes
from drivetrain.launch.processes import state_of
from drivetrain.launch.rank import TASK
from drivetrain.runtime import scratch
from drivetrain.runtime.attempt import Attempt

SHOWN = 4000  # characters of a rank's output that are kept for an error


@dataclass(frozen=True)
class Seen:
    """A rank as it was seen. said: what it has written since the last look. pulse: its heart's record. outcome: how it
    ended, as JSON, so many seconds ago. kept: what the next attempt has to know (runtime/attempt.py)."""

    code: int | None
    said: str
    pulse: bytes | None
    outcome: str | None
    ended_before: float
    kept: Mapping[str, str] = field(default_factory=dict)


class RankProcess:
    def __init__(self) -> None:
        self._scratch = scratch.make()
        self._folder = self._scratch.path
        self._process: subprocess.Popen[bytes] | None = None
        self._local, self._read = 0, 0

    def place(self, address: str) -> tuple[str, int]:
        """Returns this machine's name, and a port that is free there. address: by which others reach it."""
        with closing(socket.socket()) as bound:
            bound.bind((address, 0))
            return socket.gethostname(), int(bound.getsockname()[1])

    def start(
        self,
        job: str,
        since_seconds: float,
        attempt: Mapping[str, Any],
        kept: Mapping[str, str],
        ranks: Mapping[str, str],
        work_folder: str,
    ) -> None:
        """Starts the rank. job, attempt: as texts and fields; the launch began so many seconds ago. ranks: RANK,
        WORLD_SIZE and so on. work_folder: where relative paths begin."""
        task = Job.model_validate_json(job)
        (self._folder / TASK).write_text(job, encoding="utf-8")
        Attempt(time.monotonic() - since_seconds, **attempt, folder=self._folder).write()
        Attempt(folder=self._folder).restore(kept)
        self._local = int(ranks["LOCAL_RANK"])
        # Ray sets OMP_NUM_THREADS to the cores that the actor holds, as a user may
        environment = {**environment_of_ranks(task, int(ranks["LOCAL_WORLD_SIZE"])), **os.environ, **ranks}
        command = [sys.executable, "-m", "drivetrain.launch.rank", str(self._folder), str(os.getpid())]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=work_folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def look(self) -> Seen:
        assert self._process is not None, "start comes first"
        code = self._process.poll()  # before the files, which are complete once it has ended
        with (self._folder / "log").open("rb") as log:
            log.seek(self._read)
            said = log.read()
        self._read += len(said)
        ended = outcomes(self._folder)
        pulse = pulse_file(self._folder, self._local)
        return Seen(
            code,
            said.decode("utf-8", errors="replace"),
            pulse.read_bytes() if pulse.exists() else None,
            ended[0].model_dump_json() if ended else None,
            time.monotonic() - ended[0].time if ended else 0.0,
            Attempt(folder=self._folder).kept(),
        )

    def stands(self, still_seconds: float) -> dict[str, Any] | None:
        """Returns where the rank stands, as a row of a hang report; None if it has not begun."""
        found = pulses(self._folder)
        if self._local not in found:
            return None
        pulse = found[self._local]
        state = state_of(pulse)
        standing = Standing() if state == "gone" else ask(self._folder, found).get(self._local, Standing())
        return Row(pulse, socket.gethostname(), state, still_seconds, standing).as_dict()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Ends the rank, if it still runs, and deletes its folder."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._scratch.close()
