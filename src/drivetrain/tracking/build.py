"""Builds the run file's trackers, and the stream that sends them events."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

from drivetrain.errors import RunError, UserError, problem
from drivetrain.runtime.run_folder import SameFolder
from drivetrain.tracking.events import Event, RunFinished, Tracker
from drivetrain.tracking.jsonl import JsonlTracker
from drivetrain.tracking.progress import ProgressTracker
from drivetrain.trust.import_path import import_object

TRACKERS = {
    "tensorboard": "drivetrain.tracking.tensorboard:TensorBoardTracker",
    "wandb": "drivetrain.tracking.wandb:WandbTracker",
    "mlflow": "drivetrain.tracking.mlflow:MlflowTracker",
    "trackio": "drivetrain.tracking.trackio:TrackioTracker",
    "swanlab": "drivetrain.tracking.swanlab:SwanlabTracker",
    "prometheus": "drivetrain.tracking.prometheus:PrometheusTracker",
    "opentelemetry": "drivetrain.tracking.opentelemetry:OpenTelemetryTracker",
}
BUILT_IN = ("progress", "jsonl", *TRACKERS)


def build_trackers(names: Sequence[str], folder: Path, quiet: bool = False) -> list[Tracker]:
    """Returns the trackers: JSON Lines first and always, then those named. Raises UserError for an unknown name."""
    trackers: list[Tracker] = [JsonlTracker(folder)]
    for name in names:
        if name == "progress":
            trackers.append(ProgressTracker(quiet))
        elif name != "jsonl":
            trackers.append(_tracker_class(name)(folder))
    return trackers


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for an unknown name, without making a tracker."""
    for name in names:
        if name not in ("progress", "jsonl"):
            _tracker_class(name)


class EventStream:
    """Sends every event to every tracker, in order."""

    def __init__(self, trackers: Sequence[Tracker], folder: Path | None = None) -> None:
        """folder: the run's, which has to stay in its place."""
        self._trackers, self._folder = list(trackers), None if folder is None else SameFolder(folder)
        self._lock = threading.RLock()  # a save tells from a thread of its own

    def send(self, event: Event) -> None:
        """Sends an event. A tracker that fails ends the run: silence would be a gap in the record."""
        with self._lock:
            self.check()
            for tracker in self._trackers:
                with _blamed(tracker, event.kind):
                    tracker.handle(event)

    @property
    def in_place(self) -> bool:
        """Returns whether the run's folder is still in its place."""
        return self._folder is None or self._folder.in_place

    def check(self) -> None:
        """Raises RunError if the run's folder was deleted, moved or replaced."""
        if self._folder is not None:
            self._folder.check()

    def close_failed(self, error: BaseException) -> None:
        """Sends the end of a run that failed. Errors here (a full disk) came later and are passed over."""
        with suppress(RunError):
            self.send(RunFinished(status="failed", step=-1, message=f"{type(error).__name__}: {error}"))
        with suppress(RunError):
            self.close()

    def close(self) -> None:
        with ExitStack() as stack:  # each, also where another one's fails
            for tracker in self._trackers:
                stack.enter_context(_blamed(tracker, "closing"))
                stack.callback(tracker.close)


@contextmanager
def _blamed(tracker: Tracker, what: str) -> Iterator[None]:
    try:
        yield
    except (RunError, UserError):
        raise
    except Exception as error:
        name = type(tracker).__name__
        raise RunError(f"the tracker {name} failed on {what}: {type(error).__name__}: {error}") from error


def _tracker_class(name: str) -> Callable[[Path], Tracker]:
    if name not in TRACKERS and not set(name) & set(".:"):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(BUILT_IN)}; others as package.module:Class"
        raise problem("tracking.trackers", f"there is no tracker {name!r}", fix)
    found = import_object(TRACKERS.get(name, name), "tracking.trackers", "class")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise problem("tracking.trackers", f"{name} is no Tracker", "derive from drivetrain.tracking.events.Tracker")
    return cast(Callable[[Path], Tracker], found)
