"""Processes that start in tenths of a second, since what they import is there already.

A nursery is a process that has imported everything and computed nothing. Asked over a socket it forks, twice, and the
one in between ends: the new process then belongs to the process that asked, as if that had started it (both ask Linux
for orphans, PR_SET_CHILD_SUBREAPER). chaos.py has launchers from a nursery of its own, and each launcher begins by
forking one for its ranks, which torch elastic starts through it; from there on all is as after `drivetrain train`.

    python -m bench.warm <socket's descriptor> <modules to import, with commas>
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.launch.chaos import WARM, children_of

_SET_NAME, _SET_SUBREAPER = 15, 36
_LARGEST = 2**20
IMPORTED = (
    "drivetrain.cli.train",
    "drivetrain.launch.rank",
    "drivetrain.launch.execute",
    "drivetrain.training.run",
    "drivetrain.launch.restarts",
    "drivetrain.config.rules",
    "drivetrain.engines.single",
    "drivetrain.workloads.user_task",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.registry",
)


class Born:
    """A forked process, as subprocess.Popen shows one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The asking side. Ends with the process that has it."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        _adopt()
        self._socket, other = socket.socketpair()
        words = [sys.executable, "-m", "bench.warm", str(other.fileno()), ",".join([*IMPORTED, *modules])]
        self._process = subprocess.Popen(words, pass_fds=[other.fileno()], env=dict(environment))
        other.close()
        assert self._socket.recv(_LARGEST) == b"ready", "the nursery could not import what it is to have"

    def launcher(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: IO[Any]) -> Born:
        """`drivetrain arguments` in the folder."""
        return _ask(self._socket, _launch, [str(each) for each in arguments], dict(environment), folder, log, log)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def reap(spared: Sequence[int]) -> None:
    """Take leave of dead processes that came to this one: ranks of launchers that were killed, and their nurseries."""
    for pid in {*children_of(os.getpid())} - {*spared}:
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                os.waitpid(pid, os.WNOHANG)


# --- the nursery -----------------------------------------------------------------------------------------------------


def main() -> None:
    asking = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    asking.send(b"ready")
    _serve(asking)


def _ask(
    asking: socket.socket, do: Any, words: Sequence[str], environment: Mapping[str, str], folder: Path, *files: IO[Any]
) -> Born:
    """A process of this one's that does `do(words)` in the folder. files: its standard output and its errors."""
    request = {
        "do": do.__name__,
        "words": words,
        "environment": environment,
        "folder": str(folder),
        "parent": os.getpid(),
    }
    socket.send_fds(asking, [json.dumps(request).encode()], [file.fileno() for file in files])
    return Born(int(asking.recv(_LARGEST)))


def _serve(asking: socket.socket) -> None:
    """Until the other end is gone."""
    os.setpgid(0, 0)  # Ctrl-C is for the one that asks
    while True:
        request, files, _, _ = socket.recv_fds(asking, _LARGEST, 2)
        if not request:
            os._exit(0)
        between = os.fork()
        if not between:
            if not os.fork():
                _begin(json.loads(request), files, asking)
            os._exit(0)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _begin(request: Mapping[str, Any], files: Sequence[int], asking: socket.socket) -> None:
    """Does not return."""
    code = 1
    try:
        while os.getppid() != request["parent"]:
            time.sleep(0.0005)
        os.setsid()
        for file, place in zip(files, (1, 2), strict=True):
            os.dup2(file, place)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        tempfile.tempdir = None
        asking.send(str(os.getpid()).encode())
        asking.close()
        globals()[request["do"]](request["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _adopt() -> None:
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)


# --- what the processes do -------------------------------------------------------------------------------------------


def _launch(arguments: list[str]) -> None:
    """The command, whose ranks come from a nursery that is forked here, before there is any thread."""
    _adopt()
    own, other = socket.socketpair()
    if not os.fork():
        own.close()
        _serve(other)
    other.close()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def started(handler: Any, words: Sequence[str], environment: Mapping[str, str]) -> Born:
        with open(os.dup(1), "w") as output, open(os.dup(2), "w") as errors:
            files = (handler._stdout or output, handler._stderr or errors)
            return _ask(own, _rank, words, environment, Path.cwd(), *files)

    subprocess_handler.SubprocessHandler._popen = started
    sys.argv = ["drivetrain", *arguments]
    importlib.import_module("drivetrain.cli").main(arguments)


def _rank(words: list[str]) -> None:
    """words: the command that would have started it, `python -m drivetrain.launch.rank <folder> <parent>`."""
    ctypes.CDLL(None).prctl(_SET_NAME, WARM.encode(), 0, 0, 0)
    *_, module, folder, parent = words
    importlib.import_module(module).main(Path(folder), int(parent))


if __name__ == "__main__":
    main()
