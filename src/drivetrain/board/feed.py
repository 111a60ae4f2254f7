"""One stream of changes for all runs and the queue, however many pages listen.

A thread looks at the folders once a second while anyone listens; each page gets what changed, and after a lost
connection what it has missed, by the number of the last event that it had.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from drivetrain.board.queue import Queue
from drivetrain.board.runs import Runs
from drivetrain.runtime.strict_json import plain

LOG = logging.getLogger(__name__)
SECONDS = 1.0
WAIT = 0.25  # seconds between a page's looks at what is new: no system call, so that many pages cost little
KEPT = 500  # events
MOST_RUNS = 200  # in a snapshot
LINGER = 10.0  # seconds for which it goes on looking when the last page has gone: a reload comes back


class Feed:
    """Numbers of events begin with a text of this server's own, so that those of an earlier one are not taken for
    them."""

    def __init__(self, runs: Runs, queue: Queue) -> None:
        self._runs, self._queue = runs, queue
        self._own = secrets.token_hex(4)
        self._number = 0
        self._events: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._shown: dict[str, dict[str, Any]] = {}
        self._queue_shown: dict[str, Any] = {}
        self._listening, self._last_listened = 0, 0.0
        self._wake, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join()

    async def events(self, after: str | None) -> AsyncGenerator[bytes, None]:
        """Yields a snapshot, or what came after an event, and then what comes."""
        self._listening += 1
        self._wake.set()
        try:
            known = self._number_of(after)
            if known is None:
                body, seen = await asyncio.to_thread(self._snapshot)
                yield body
            else:
                seen = known
            while not self._ended.is_set():
                while seen == self._number and not self._ended.is_set():
                    await asyncio.sleep(WAIT)
                with self._lock:
                    new = [(number, body) for number, body in self._events if number > seen]
                for number, body in new:
                    seen = number
                    yield body
        finally:
            self._listening -= 1
            self._last_listened = time.monotonic()

    def look(self) -> None:
        """Looks at the folders once, and appends what changed since."""
        with self._lock:
            runs = {each["name"]: each for each in self._runs.all()}
            changed = [each for name, each in runs.items() if self._shown.get(name) is not each]
            gone = [name for name in self._shown if name not in runs]
            self._shown = runs
            if changed or gone:
                self._append("runs", {"changed": changed, "gone": gone})
            queue = self._queue.shown()
            if _without_noise(queue) != _without_noise(self._queue_shown):
                self._append("queue", queue)
            self._queue_shown = queue

    def _look(self) -> None:
        while not self._ended.is_set():
            if self._listening or time.monotonic() - self._last_listened < LINGER:
                try:
                    self.look()
                except Exception:  # a folder that vanished in between must not end the stream for good
                    LOG.exception("the runs could not be looked at; it goes on")
                self._wake.wait(SECONDS)
            else:
                self._wake.wait()
            self._wake.clear()

    def _append(self, kind: str, data: dict[str, Any]) -> None:
        self._number += 1
        self._events.append((self._number, self._event(kind, data)))

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        text = json.dumps(plain(data), ensure_ascii=False, allow_nan=False)
        return f"id: {self._own}-{self._number}\nevent: {kind}\ndata: {text}\n\n".encode()

    def _snapshot(self) -> tuple[bytes, int]:
        self.look()
        with self._lock:
            runs = [*self._shown.values()][:MOST_RUNS]
            return self._event("snapshot", {"runs": runs, "queue": self._queue_shown}), self._number

    def _number_of(self, after: str | None) -> int | None:
        """Returns the number of an event that all later ones are still kept of; None where a snapshot is needed."""
        own, _, number = (after or "").partition("-")
        if own != self._own or not number.isdecimal() or len(number) > 18 or int(number) > self._number:
            return None
        first = self._events[0][0] if self._events else self._number + 1
        return int(number) if int(number) >= first - 1 else None


def _without_noise(queue: dict[str, Any]) -> dict[str, Any]:
    """Returns the queue without what changes all the time."""
    devices = [{**each, "used_bytes": None, "utilisation": None} for each in queue.get("devices", [])]
    return {**queue, "devices": devices, "disk": {**queue.get("disk", {}), "free_bytes": None}}
