"""A line on stderr that says what is being done, for work of which it is not known how much there is."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

FIRST = 2.0  # seconds, after which a terminal shows its line
LOOKED_EVERY = 1.0  # seconds: a terminal's line shows the time
SAID_EVERY = 20.0  # seconds, elsewhere


class StatusLine:
    """Shows the latest text, and the time since the work began: on a terminal in one line that changes, elsewhere in a
    line now and then. A thread does it, since a single piece of the work may take minutes.

    The line is on stderr whatever stdout is, which may be a file that takes the result.
    """

    def __init__(self, what: str) -> None:
        self._what, self._text = what, ""
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._width = 0  # of what a terminal shows
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="status line", daemon=True)

    def say(self, text: str) -> None:
        """Takes what is being done from now on; nothing is shown before the first."""
        with self._lock:
            self._text = text

    def look(self) -> None:
        """Shows the line, if it is time to."""
        with self._lock:
            now = time.monotonic()
            passed = now - self._start
            due = passed >= FIRST if self._terminal else now - self._last >= SAID_EVERY
            if not due or not self._text or self._ended.is_set():
                return
            self._last = now
            line = f"{self._what}: {self._text}, {int(passed) // 60} min {int(passed) % 60} s"
            if not self._terminal:
                print(line, file=sys.stderr, flush=True)
                return
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)  # the result takes its place

    def _watch(self) -> None:
        while not self._ended.wait(LOOKED_EVERY):
            self.look()
