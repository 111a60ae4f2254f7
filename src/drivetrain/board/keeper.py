"""Keeps one process of the queue: starts it, passes wishes to stop on, and writes down how it ended.

    python -m drivetrain.board.keeper ENTRY_FOLDER DEVICES

The server starts it in a session of its own and forgets it: neither the server's death nor a closed page or terminal
reaches it. It claims the entry first, so that a second keeper of the same entry does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from drivetrain.board.entries import ENDED, ENTRY, LOG, NOT_STARTED, OUTPUT, claimed, read_stop
from drivetrain.board.records import TEXTS, Asked, Claim, Ended, now
from drivetrain.runtime.atomic_file import write_whole

POLL_SECONDS = 0.3
MODULE = "drivetrain.board.keeper"
HIDDEN = ("DRIVETRAIN_BOARD_TOKEN", "DRIVETRAIN_API_KEY")  # variables that no process of the queue is given
TAKEN = 3  # exit code of a keeper whose entry another one has


def start(folder: Path, devices: Sequence[str], variables: Mapping[str, str]) -> int:
    """Starts the keeper of an entry, and returns its process number. variables: beside the server's own."""
    own = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    command = [sys.executable, "-m", MODULE, str(folder), json.dumps(list(devices))]
    printed = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # a file: a pipe without a reader would stop it when it is full
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(folder / LOG), printed, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, {**own, **variables}, file_actions=files, setsid=True)


def keep(folder: Path, devices: list[str]) -> int:
    """Runs the entry's command unless it was taken. Returns the keeper's own exit code."""
    asked = Asked.model_validate_json((folder / ENTRY).read_bytes())
    own = psutil.Process()
    claim = Claim(
        by="keeper",
        time=now(),
        host=socket.gethostname(),
        process=own.pid,
        created=own.create_time(),
        devices=devices,
    )
    if not claimed(folder, claim):
        return TAKEN
    try:
        process = _started(folder, asked)
    except (OSError, ValueError) as error:  # words that are too long for a process, or have a NUL; too little memory
        why = f"drivetrain {asked.verb} could not be started: {getattr(error, 'strerror', None) or error}"
        write_whole(folder / ENDED, Ended(code=NOT_STARTED, time=now(), reason=why).model_dump_json())
        return 0
    code = _watched(folder, process)
    write_whole(folder / ENDED, Ended(code=code, time=now()).model_dump_json())
    return 0


def _started(folder: Path, asked: Asked) -> subprocess.Popen[bytes]:
    """Starts the entry's command, with the texts that its user typed as its input."""
    result = LOG if asked.verb == "train" else OUTPUT
    texts = folder / TEXTS
    with (
        (folder / LOG).open("ab") as log,
        (folder / result).open("ab") as output,
        (texts if texts.exists() else Path(os.devnull)).open("rb") as given,
    ):
        return subprocess.Popen(
            [sys.executable, "-m", "drivetrain", *asked.words],
            stdin=given,
            stdout=output,
            stderr=log,
            start_new_session=True,  # so that a kill of its whole group spares the keeper
        )


def _watched(folder: Path, process: subprocess.Popen[bytes]) -> int:
    """Waits for the process, and stops it where stop.json or a signal to the keeper asks for that."""
    asked_to: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        asked_to.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, receive)
    is_told = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)
        stop = read_stop(folder)
        if stop is not None and stop.now:
            _kill(process)
        elif not is_told and (stop is not None or asked_to):
            process.send_signal(signal.SIGTERM)  # which saves first
            is_told = True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, its group, and descendants that left the group."""
    family = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with contextlib.suppress(psutil.Error):
            each.kill()


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), json.loads(sys.argv[2])))
