"""Ends ranks that wait for a peer which has failed.

Over gloo a rank whose peer is gone gets an error at once. One that waits in NCCL gets none, and a request to end
(SIGTERM) does not reach a program that is inside a call: it would keep its GPU until torch's launcher kills it after
30 s, or, on another machine than the failed rank's, until `hang_seconds` are over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from drivetrain.launch.diagnostics.process_state import Standing
from drivetrain.launch.diagnostics.stack_request import ask
from drivetrain.launch.diagnostics.stillness import Stillness
from drivetrain.launch.outcome import RankOutcome, cause_of, outcomes, stranded
from drivetrain.launch.processes import kill, state_of
from drivetrain.launch.rendezvous import Meeting
from drivetrain.runtime.heartbeat import Pulse

STILL_SECONDS = 5.0  # in which a rank that can notice its peer's end does
DYING_SECONDS = 5.0  # that a killed process takes to be gone


class Stranded:
    """Follows the ranks of this machine from the failure of one, or of another machine's."""

    def __init__(self, folder: Path, meeting: Meeting) -> None:
        self._folder, self._meeting = folder, meeting
        self._moves: Stillness | None = None

    def failed(self, ended: Sequence[RankOutcome]) -> str:
        """Returns the name of the rank that failed first, here or else on another machine; "" as long as none has.

        ended: outcomes of this machine's ranks. A failure among them is passed on to the other machines.
        """
        failures = [outcome for outcome in ended if outcome.kind != "done"]
        if failures:
            name = f"rank {cause_of(failures).rank}"
            self._meeting.tell_failure(name)
            return name
        return self._meeting.failure()

    def look(self, now: float, running: Mapping[int, Pulse], failed: str) -> None:
        """Ends those of the running ranks (by local rank) that have stood still for STILL_SECONDS since the failure,
        and writes their outcome. One that writes a checkpoint on its own may finish it."""
        self._moves = self._moves or Stillness(now)
        self._moves.look(now, {pulse.process: pulse.moves for pulse in running.values()})
        still = {
            local: pulse for local, pulse in running.items() if self._moves.of(pulse.process, now) >= STILL_SECONDS
        }
        able = {local: pulse for local, pulse in still.items() if state_of(pulse) in ("waits", "disk")}
        found = ask(self._folder, able) if able else {}
        waiting = [pulse for local, pulse in still.items() if not found.get(local, Standing()).writes]
        kill(waiting)
        for pulse in waiting:
            _leave(self._folder, pulse, failed)


def _leave(folder: Path, pulse: Pulse, failed: str) -> None:
    """Writes the outcome of a rank that was killed, unless it wrote one itself before."""
    until = time.monotonic() + DYING_SECONDS
    while state_of(pulse) != "gone" and time.monotonic() < until:
        time.sleep(0.05)
    if all(outcome.rank != pulse.rank for outcome in outcomes(folder)):
        with suppress(OSError):  # a full disk: the failed rank's error is what counts
            stranded(pulse.rank, failed).write(folder)
