"""An actor that runs one cell on its machine of a cluster, and answers how it does. It knows nothing of the cluster."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from drivetrain.compare.cell import REQUEST
from drivetrain.compare.cell_process import CellProcess, Glance, Limits
from drivetrain.compare.outcome import Outcome

END_SECONDS = 10


@dataclass(frozen=True)
class Seen:
    """A cell as it was seen last. outcome: how it ended. failure: why it could not be run on this machine."""

    glance: Glance | None
    outcome: Outcome | None
    failure: str | None


class CellActor:
    def __init__(self) -> None:
        self._glance: Glance | None = None
        self._outcome: Outcome | None = None
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, folder: str, key: str, limits: Limits, work_folder: str, coordinates: bool, cores: int) -> None:
        """Starts the cell whose request lies in a folder. work_folder: where its relative paths begin. coordinates:
        whether its work is done elsewhere, so that this machine's other programs say nothing of it. cores: that Ray
        counts for it, one a device."""
        arguments = (Path(folder), key, limits, Path(work_folder), coordinates, cores)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def look(self) -> Seen:
        return Seen(self._glance, self._outcome, self._failure)

    def end(self) -> None:
        """Ends the cell and all its processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self, folder: Path, key: str, limits: Limits, work_folder: Path, coordinates: bool, cores: int) -> None:
        try:
            if not (folder / REQUEST).is_file():
                where = socket.gethostname()
                raise FileNotFoundError(f"{folder} is not seen on {where}: all machines have to see it at this place")
            outcome = CellProcess(folder, key, limits).run(
                self._look_at, self._stop.is_set, _environment(cores), work_folder
            )
            if coordinates:
                outcome = outcome.model_copy(update={"foreign_share": None})
                outcome.write(folder)
            self._outcome = outcome
        except KeyboardInterrupt:
            self._failure = "interrupted"
        except Exception as error:  # the comparison hears of it, and this cell fails alone
            self._failure = f"{type(error).__name__}: {error}"

    def _look_at(self, glance: Glance) -> None:
        self._glance = glance


def _environment(cores: int) -> dict[str, str]:
    """Returns the environment of the cell. Ray sets OMP_NUM_THREADS to all cores of an actor, which is one a device;
    a number that the user has set stays."""
    found = dict(os.environ)
    if found.get("OMP_NUM_THREADS") == str(cores):
        found["OMP_NUM_THREADS"] = "1"
    return found
