"""Work that waits for other machines, done beside the main thread, which a signal can so call away at any time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from drivetrain.errors import Stopping
from drivetrain.workloads.generating import dropped

T = TypeVar("T")
LOOK = 0.2  # seconds between looks at the signal


def beside(work: Callable[[], T], is_stopping: Callable[[], bool]) -> T:
    """Returns the result of `work`, or raises its error; raises Stopping once the run is to stop."""
    return all_beside(lambda _: work(), range(1), 1, is_stopping)[0]


def all_beside(
    work: Callable[[int], T],
    numbers: Iterable[int],
    at_once: int,
    is_stopping: Callable[[], bool],
    came: Callable[[int, T], None] = dropped,
) -> dict[int, T]:
    """Returns the results of `work` by the numbers that it is called with, so many at once. Raises the first error, or
    Stopping once the run is to stop.

    came: called with each number and its result, by one thread at a time. Threads that still wait after an error are
    left behind: they begin nothing more, what comes for them is dropped, and the process ends without them.
    """
    workers = _Workers(work, numbers, came)
    try:
        for _ in range(min(at_once, workers.count)):
            threading.Thread(target=workers.run, name="rollout", daemon=True).start()
        while not workers.are_done():
            if is_stopping():
                raise Stopping("a signal ended the wait for a server")
    finally:
        workers.end()
    return workers.found


class _Workers(Generic[T]):
    def __init__(self, work: Callable[[int], T], numbers: Iterable[int], came: Callable[[int, T], None]) -> None:
        self._work, self._came = work, came
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # None: a result came
        self._over, self._lock = threading.Event(), threading.Lock()
        self.found: dict[int, T] = {}
        for number in numbers:
            self._waiting.put(number)
        self.count = self._waiting.qsize()

    def run(self) -> None:
        """Works in a thread of its own until nothing waits."""
        with suppress(queue.Empty):
            while not self._over.is_set():
                number = self._waiting.get_nowait()
                try:
                    self._keep(number, self._work(number))
                except BaseException as error:
                    self._errors.put(error)
                    return

    def _keep(self, number: int, result: T) -> None:
        with self._lock:
            if not self._over.is_set():
                self._came(number, result)
                self.found[number] = result
                self._errors.put(None)

    def are_done(self) -> bool:
        """Waits a little for a result. Raises the error of a thread that met one."""
        if len(self.found) < self.count:
            with suppress(queue.Empty):
                error = self._errors.get(timeout=LOOK)
                if error is not None:
                    raise error
        return len(self.found) == self.count

    def end(self) -> None:
        with self._lock:
            self._over.set()
