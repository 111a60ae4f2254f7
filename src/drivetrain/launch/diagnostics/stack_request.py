"""Requests a rank's stacks, and answers with them: through files of the launch's folder on its machine.

The rank's heart answers, in a thread of its own. If a call holds Python's lock it cannot, and a signal makes C code
write the stacks instead, which needs no lock. A stopped process answers neither.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from drivetrain.launch.diagnostics.process_state import Standing, read_stacks, standing
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.heartbeat import Heart, Pulse, read

ANSWER_SECONDS = 4.0  # ranks look for a question once a second
_ASK = "ask"
# beyond the usual ones, which schedulers and users have plans for; macOS has none
_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


def pulse_file(folder: Path, local_rank: int) -> Path:
    return folder / f"pulse-{local_rank}"


def pulses(folder: Path) -> dict[int, Pulse]:
    """Returns the pulses of the ranks that have begun on this machine, by local rank."""
    found = {int(path.name.removeprefix("pulse-")): read(path) for path in folder.glob("pulse-*") if not path.suffix}
    return {local: pulse for local, pulse in sorted(found.items()) if pulse is not None}


def forget(folder: Path) -> None:
    """Deletes the files of an earlier attempt's ranks."""
    for pattern in ("pulse-*", "answer-*", "stacks-*", _ASK):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class Answers:
    """A rank's side: called at its heart's beats."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._folder, self._local, self._answered = folder, local_rank, ""
        if _SIGNAL is not None:
            self._stacks = (folder / f"stacks-{local_rank}").open("w")
            faulthandler.register(_SIGNAL, self._stacks, all_threads=True)

    def __call__(self, heart: Heart, still: float) -> None:
        del still
        try:
            asked = (self._folder / _ASK).read_text()
        except OSError:
            return
        if asked and asked != self._answered:
            self._answered = asked
            # torch's recorder asks the GPU, which may not answer either: the stacks come first
            with suppress(OSError):  # a full disk: the signal is left
                for is_recorded in (False, True):
                    self._answer(asked, standing(heart.main, is_recorded), is_recorded)

    def _answer(self, asked: str, found: Standing, is_whole: bool) -> None:
        answer = {"asked": asked, "whole": is_whole, "standing": found.as_dict()}
        write_whole(self._folder / f"answer-{self._local}.json", json.dumps(answer))


class Alone:
    """The side of a process without a watchdog: it reports once that nothing goes on, and does not end."""

    def __init__(self, seconds: int | None) -> None:
        self._seconds, self._reported = seconds, False

    def __call__(self, heart: Heart, still: float) -> None:
        if self._seconds is None or still < self._seconds:
            self._reported = False
        elif not self._reported:
            self._reported = True
            pulse, found = heart.read(), standing(heart.main)
            waits = f", waiting in {found.waits_in}" if found.waits_in else ""
            children = "".join(f"; {child}" for child in found.children)
            reported = f"rank {pulse.rank}: nothing has gone on for {still:.0f} s ({pulse.where}{waits})"
            sys.stderr.write(f"{reported}{children}. It stands here:\n{found.stacks}")
            sys.stderr.flush()


def ask(folder: Path, wanted: Mapping[int, Pulse], stopped: Mapping[int, Pulse] | None = None) -> dict[int, Standing]:
    """Returns where these ranks stand, by local rank; without those that cannot answer. They have some seconds.

    stopped: ranks that are; they are continued for a moment and stopped again.
    """
    number, until = str(time.time_ns()), time.monotonic() + ANSWER_SECONDS
    (folder / _ASK).write_text(number)
    answers: dict[int, tuple[bool, Standing]] = {}
    while time.monotonic() < until and not all(answers.get(local, (False,))[0] for local in wanted):
        time.sleep(0.1)
        for local in wanted:
            with suppress(OSError):
                found = json.loads((folder / f"answer-{local}.json").read_text())
                if found["asked"] == number:
                    answers[local] = found["whole"], Standing.of(found["standing"])
    reported = {local: answer for local, (_, answer) in answers.items()}
    silent = {local: pulse for local, pulse in wanted.items() if local not in reported}
    for local, pulse in (silent | dict(stopped or {})).items():
        reported[local] = _by_signal(
            folder / f"stacks-{local}", pulse.process, stopped is not None and local in stopped
        )
    return reported


def _by_signal(file: Path, process: int, is_stopped: bool) -> Standing:
    """Returns faulthandler's output for a rank that no longer beats. A stopped one gets the signal before all else."""
    if _SIGNAL is None:
        return Standing()
    start, until, size = _size(file), time.monotonic() + 1.0, -1
    with suppress(ProcessLookupError):
        os.kill(process, _SIGNAL)
        if is_stopped:
            os.kill(process, signal.SIGCONT)
        while time.monotonic() < until and (size == start or size != _size(file)):  # until it has come to its end
            size = _size(file)
            time.sleep(0.005)
        if is_stopped:
            os.kill(process, signal.SIGSTOP)
    try:
        return read_stacks(file.read_text(errors="replace")[start:])
    except OSError:
        return Standing()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
