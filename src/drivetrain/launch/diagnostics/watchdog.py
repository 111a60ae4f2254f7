"""Watches the ranks of this machine: detects when none of them goes on, reports which one waits where, and ends them.

A rank goes on when its heart counts (heartbeat.py): it enters another part of a step or another line of Python, or it
computes. As long as one does, the others wait for good reason: for the first rank to tokenise, say, or to save. With
several machines each sends the others how far its ranks have counted.

torch has parts of this, over NCCL alone: its watchdog ends a rank after a time-out, and its flight recorder lists
collectives, which a tool compares afterwards. Neither sees a rank that is stopped, that waits for a file, or that hangs
between two collectives over gloo. py-spy prints Python's stacks where the machine allows one process to trace another,
which containers rarely do.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.launch.diagnostics.hang_report import Row, blame, in_full, table
from drivetrain.launch.diagnostics.process_state import Standing
from drivetrain.launch.diagnostics.stack_request import ask, pulses
from drivetrain.launch.diagnostics.stillness import Stillness
from drivetrain.launch.diagnostics.stranded_ranks import Stranded
from drivetrain.launch.outcome import outcomes
from drivetrain.launch.processes import kill, state_of
from drivetrain.launch.rendezvous import Meeting
from drivetrain.runtime import storage
from drivetrain.runtime.heartbeat import Pulse
from drivetrain.runtime.run_folder import RunFolder

POLL_SECONDS = 1.0
NOTICE_SECONDS = 45  # a possible hang is reported so early, and does not end the run yet
GONE_SECONDS = 10  # a rank that ended without a word leaves others an error of the network, most times
NODES_SECONDS = 10  # in which the others say where their ranks stand


class Watch:
    """While the block runs, watches the ranks; afterwards `hang` has the report if they were ended."""

    hang: str | None = None

    def __init__(self, folder: Path, run: RunConfig, meeting: Meeting) -> None:
        self._folder, self._run, self._meeting = folder, run, meeting
        self._moves, self._beats = Stillness(time.monotonic()), Stillness(time.monotonic())
        self._gone, self._noticed = Stillness(time.monotonic()), False
        self._stranded = Stranded(folder, meeting)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=60)  # another machine may keep it waiting

    def _watch(self) -> None:
        while self.hang is None and not self._over.wait(POLL_SECONDS):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        ended = outcomes(self._folder)
        over = {outcome.rank for outcome in ended}
        running = {local: pulse for local, pulse in pulses(self._folder).items() if pulse.rank not in over}
        failed = self._stranded.failed(ended)
        if failed:
            self._stranded.look(now, running, failed)
        elif running:
            self._look_at(running, now)

    def _look_at(self, running: Mapping[int, Pulse], now: float) -> None:
        own: dict[Hashable, object] = {pulse.process: pulse.moves for pulse in running.values()}
        own["all nodes"] = self._meeting.progress(sum(pulse.moves for pulse in running.values()))
        still = self._moves.look(now, own)
        self._beats.look(now, {pulse.process: pulse.beats for pulse in running.values()})
        gone = tuple(pulse.process for pulse in running.values() if state_of(pulse) == "gone")
        for_long = self._gone.look(now, {"gone": gone}) >= GONE_SECONDS
        limit = self._run.hang_seconds
        if gone and len(gone) < len(running) and for_long:
            self._end(running, "")
        elif limit is not None and still >= limit:
            self._end(running, f" (nothing has gone on for {still:.0f} s)")
        elif still < NOTICE_SECONDS:
            self._noticed = False
        elif not self._noticed:
            self._noticed = True
            self._notice(running, still)

    def _notice(self, running: Mapping[int, Pulse], still: float) -> None:
        limit = self._run.hang_seconds
        then = "" if limit is None else f". The run ends when it lasts for {limit} s (hang_seconds)"
        _say(f"Nothing has gone on for {still:.0f} s: {blame(self._rows(running, False))}{then}")

    def _end(self, running: Mapping[int, Pulse], since: str) -> None:
        """Reports which rank waits where, and ends the ranks. Their launcher sees that, and reads the reason."""
        own = self._rows(running, True)
        rows = sorted([*own, *self._others(own)], key=lambda row: row.rank)
        goes_on = self._over.is_set() or self._goes_on(rows, running)  # since they were asked
        # another machine that sees the hang too says so before it ends its ranks, which ours notice: asked after them
        if goes_on and not self._meeting.hang():
            return
        kept = self._keep(in_full(rows))
        _say(f"{table(rows)}{f'With stacks in {kept}' if kept else ''}")
        self.hang = self._reason(f"hang: {blame(rows)}{since}")
        self._meeting.tell_hang(self.hang)
        kill(running.values())

    def _goes_on(self, rows: list[Row], running: Mapping[int, Pulse]) -> bool:
        """Returns whether they go on: a signal ends some calls that would not have returned. A stopped process is so
        still."""
        if any(row.state in ("stopped", "gone") for row in rows):
            return False
        now = pulses(self._folder)
        return any(local in now and now[local].moves != pulse.moves for local, pulse in running.items())

    def _rows(self, running: Mapping[int, Pulse], is_end: bool) -> list[Row]:
        now, host = time.monotonic(), socket.gethostname()
        states = {local: state_of(pulse, self._beats.of(pulse.process, now)) for local, pulse in running.items()}
        able = {local: pulse for local, pulse in running.items() if states[local] in ("waits", "silent", "disk")}
        stopped = {local: pulse for local, pulse in running.items() if is_end and states[local] == "stopped"}
        found = ask(self._folder, able, stopped)
        return [
            Row(pulse, host, states[local], self._moves.of(pulse.process, now), found.get(local, Standing()))
            for local, pulse in running.items()
        ]

    def _others(self, own: list[Row]) -> list[Row]:
        """Returns rows of the other machines, which find the hang at about the same time."""
        reported = self._meeting.rows(json.dumps([row.as_dict() for row in own]), NODES_SECONDS)
        return [Row.of(row) for text in reported for row in json.loads(text)]

    def _reason(self, own: str) -> str:
        """Returns the sentence of the first machine, where only that one has all rows; else this machine's."""
        until = time.monotonic() + 2 * NODES_SECONDS
        while not self._meeting.reads_all and time.monotonic() < until:
            if self._meeting.hang():
                return self._meeting.hang()
            time.sleep(0.5)
        return own

    def _keep(self, text: str) -> Path | None:
        """Writes the report into the run's folder, if there is one."""
        folder = RunFolder(self._run.folder)
        if not folder.run_file.exists() or not self._meeting.is_first:
            return None
        path = folder.hangs / time.strftime("%Y-%m-%dT%H-%M-%S.txt")
        with suppress(OSError):  # a full disk, or one that does not answer
            storage.make(folder.hangs)
            storage.put(path, text)
            return path
        return None


def left_quietly(folder: Path, reported: Mapping[int, Any]) -> str | None:
    """Finds the rank that failed first: the one that ended with exit code 0 and without a report, before its peers'
    connection errors.

    reported: when each rank reported how it ended, by time.monotonic.
    """
    for pulse in pulses(folder).values():
        if pulse.rank not in reported and pulse.time < min(reported.values()) and state_of(pulse) == "gone":
            return f"rank {pulse.rank} ended without an error, by an exit of its own{seen(pulse)}"
    return None


def seen(pulse: Pulse | None) -> str:
    """Returns a process's last known place."""
    if pulse is None or not pulse.step:
        return ""
    return f" in step {pulse.step}" + (f" ({pulse.part})" if pulse.part else "")


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
