"""The run file's trackers, and the stream that tells them."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from drivetrain.errors import RunError, UserError, problem
from drivetrain.imports import import_object
from drivetrain.tracking.events import Event, Tracker
from drivetrain.tracking.jsonl import JsonlTracker
from drivetrain.tracking.progress import ProgressTracker

TRACKERS = {
    "tensorboard": "drivetrain.tracking.tensorboard:TensorBoardTracker",
}
BUILT_IN = ("progress", "jsonl", *TRACKERS)


def build_trackers(names: Sequence[str], folder: Path, quiet: bool = False) -> list[Tracker]:
    """JSON Lines first and always, then those named. UserError for a name that is none."""
    trackers: list[Tracker] = [JsonlTracker(folder)]
    for name in names:
        if name == "progress":
            trackers.append(ProgressTracker(quiet))
        elif name != "jsonl":
            trackers.append(_tracker_class(name)(folder))
    return trackers


class EventStream:
    """Tells every tracker of every event, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._lock = threading.RLock()  # a save tells from a thread of its own

    def send(self, event: Event) -> None:
        """A tracker that fails ends the run: silence would be a gap in the record."""
        with self._lock:
            for tracker in self._trackers:
                self._tell(tracker, event)

    def _tell(self, tracker: Tracker, event: Event) -> None:
        try:
            tracker.handle(event)
        except (RunError, UserError):
            raise
        except Exception as error:
            name = type(tracker).__name__
            raise RunError(f"the tracker {name} failed on {event.kind}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _tracker_class(name: str) -> Callable[[Path], Tracker]:
    if name not in TRACKERS and not set(name) & set(".:"):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(BUILT_IN)}; others as package.module:Class"
        raise problem("tracking.trackers", f"there is no tracker {name!r}", fix)
    found = import_object(TRACKERS.get(name, name), "tracking.trackers")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise problem("tracking.trackers", f"{name} is no Tracker", "derive from drivetrain.tracking.events.Tracker")
    return cast(Callable[[Path], Tracker], found)
