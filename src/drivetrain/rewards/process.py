"""A process that computes one reward, and calls of it that end in time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from drivetrain.config.reinforcement import Reward
from drivetrain.errors import counted, problem

START_SECONDS = 120.0  # which importing the function's module may take
LARGEST = 1 << 16  # bytes read at once


class FailedCall(Exception):
    """A call that gave no rewards; the message has the reason."""


class WrongCount(FailedCall):
    """A call that gave more or fewer rewards than there are answers."""


class RewardProcess:
    """Starts with the first call, and anew after a crash or a call that took too long.

    It has a session of its own. Ctrl-C and a launcher's SIGTERM reach a run's whole process group, and the run saves
    before it stops: a call that they ended would be made again, answer by answer.
    """

    def __init__(self, reward: Reward, field: str, columns: Sequence[str] = ()) -> None:
        """columns: those that rows have, which a function of the user's own may name."""
        self._reward, self._field = reward, field
        self._columns = list(columns) if reward.import_path is not None else []
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_by: float | None = None  # while it is not known whether it is ready: the time by which it must be
        self._read = b""

    def begin(self) -> None:
        """Starts the process, if it does not run, and does not wait until it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        command = [sys.executable, "-P", "-m", "drivetrain.rewards.worker"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it imports what this process can
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._ready_by = time.monotonic() + START_SECONDS
        with suppress(BrokenPipeError):  # a process that ended is reported by `start`, which gets no answer
            function = {"path": self._reward.use, "field": self._field, "options": self._reward.options}
            self._send({**function, "columns": self._columns})

    def start(self) -> None:
        """Waits until the process is ready, and starts it before if need be. Raises UserError if the function cannot be
        imported, or not be called with what it gets."""
        self.begin()
        if self._ready_by is None:
            return
        try:
            found = self._answer(self._ready_by)
        except FailedCall as error:
            raise problem(self._field, f"{self._reward.use}: its process {error}", "correct the function") from None
        self._ready_by = None
        if "problem" in found:
            raise problem(self._field, *found["problem"])
        if "error" in found:
            raise problem(self._field, f"{self._reward.use}: {found['error']}", "correct the function")

    def values(self, given: Mapping[str, Any], count: int) -> list[tuple[float | None, str | None]]:
        """Returns `count` rewards, None where the function has none, and beside each the reason if the function's value
        is no reward. Raises FailedCall with the reason if it gave none."""
        self.start()
        row = given.get("columns", {})
        named = {name: row[name] for name in self._columns if name in row}
        found = self._asked({**given, "columns": named}, self._reward.time_limit)
        if "values" not in found:
            raise FailedCall(found.get("error") or ": ".join(found["problem"]))
        values = found["values"]
        if len(values) != count:
            raise WrongCount(f"it returned {counted(len(values), 'reward')} for {counted(count, 'answer')}")
        return [(value, failure) for value, failure in values]

    def _asked(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with suppress(BrokenPipeError):
            self._send(message)
        return self._answer(end, seconds)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, end: float, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Returns the process's answer. Raises FailedCall if it has given none by `end`, `seconds` after the call."""
        process = self._process
        assert process is not None
        line = self._line(process, end)
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = process.poll() if process.poll() is not None or time.monotonic() >= end else process.wait(10)
        self.close()
        if status is None:
            raise FailedCall(f"took more than {seconds:g} s")
        raise FailedCall(f"ended (exit code {status})" if status >= 0 else f"was ended by signal {-status}")

    def _line(self, process: subprocess.Popen[bytes], end: float) -> bytes:
        """Returns the next line, or nothing if the process ended or the time is over."""
        assert process.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            part = os.read(process.stdout.fileno(), LARGEST) if ready else b""
            if not part:
                self._read = b""
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        """Ends the process, and those that the function started: they are in its group, unless they left it."""
        process, self._process, self._read, self._ready_by = self._process, None, b"", None
        if process is None:
            return
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # none is left; macOS refuses a group of zombies
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was not written yet is lost with the process
                continue
        process.wait()
