"""Turns SIGTERM and Ctrl-C into a request to save and stop, which is checked between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`signal_number` is None until a signal came; `since` is when the first one did, by the monotonic clock."""

    signal_number: int | None = None
    since: float | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the save
        self.signal_number, self.since = number, self.since or time.monotonic()


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While the block runs, SIGTERM and SIGINT only set the request. Outside the main thread signals are unchanged."""
    request = StopRequest()
    try:
        before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Ends this process within a second or so of its parent, however that ends, and whatever it does then. parent: its
    process id."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
