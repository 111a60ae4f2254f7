"""Progress in a notebook: the cell that started other processes shows what they do.

A rank's own output goes to the streams of the kernel's process, which a notebook may show as bare terminal codes or not
at all. So ranks print nothing there, and the run's events are read from its folder as they come.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.tracking.events import EVENTS, Event, Warned
from drivetrain.tracking.jsonl import FILE_NAME, parsed
from drivetrain.tracking.progress import ProgressTracker, plain_console

POLL_SECONDS = 0.5
KINDS = {each.kind: each for each in EVENTS}


def in_notebook() -> bool:
    """Returns whether printed output goes into a notebook's cell."""
    return type(sys.stderr).__module__.startswith("ipykernel")


@contextmanager
def shown_here(folder: Path, quiet: bool) -> Iterator[None]:
    """While the block runs, prints the events of a run in the folder as they come. quiet: warnings alone."""
    follower = _Follower(folder / FILE_NAME, ProgressTracker(quiet, plain_console()))
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(follower, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(follower: _Follower, over: threading.Event) -> None:
    while not over.wait(POLL_SECONDS):
        follower.look()
    follower.look()
    follower.close()


class _Follower:
    def __init__(self, file: Path, tracker: ProgressTracker) -> None:
        self._file, self._tracker = file, tracker
        self._since, self._shown = datetime.now(UTC).isoformat(timespec="milliseconds"), set[bytes]()
        # where the kernel shows what other processes print, their warnings are there already
        self._skips_warnings = getattr(sys.stderr, "watch_fd_thread", None) is not None
        self._place: tuple[int, int] = (0, 0)  # inode, and bytes that were read

    def look(self) -> None:
        """Prints the events since the last look. A run that resumes replaces the file by a shorter one."""
        with suppress(OSError):
            with self._file.open("rb") as file:
                state = os.fstat(file.fileno())
                same = state.st_ino == self._place[0] and state.st_size >= self._place[1]
                file.seek(self._place[1] if same else 0)
                lines = file.read().split(b"\n")
                self._place = (state.st_ino, file.tell() - len(lines[-1]))
            for line in lines[:-1]:
                self._show(line)

    def _show(self, line: bytes) -> None:
        found = parsed(line)
        if found is None or str(found.get("time", "")) < self._since or line in self._shown:
            return
        self._shown.add(line)
        event = _event(found)
        if not (self._skips_warnings and isinstance(event, Warned)):
            self._tracker.handle(event)

    def close(self) -> None:
        self._tracker.close()


def _event(found: dict[str, Any]) -> Event:
    kind = KINDS[found["event"]]
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})
