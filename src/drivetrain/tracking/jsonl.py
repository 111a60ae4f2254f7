"""events.jsonl: every event of a run, a JSON object a line. samples.jsonl: prompts that were answered, one a line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.errors import RunError
from drivetrain.strict_json import dumps, restored
from drivetrain.tracking.events import Event, Generated, RunStarted, Tracker
from drivetrain.whole_file import write_whole

FILE_NAME = "events.jsonl"
SAMPLES = "samples.jsonl"


class JsonlTracker(Tracker):
    """Appends. When a run resumes, points past its first step are taken out, so that the curve has each step once.

    JSON has no NaN or infinity: strict_json.py says how such numbers are written. `read_events` gives them back.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._samples = folder / FILE_NAME, folder / SAMPLES
        for path in (self._path, self._samples):
            _drop_part(path)

    def handle(self, event: Event) -> None:
        try:
            if isinstance(event, RunStarted):
                _cut_after(self._path, event.first_step)
                _cut_after(self._samples, event.first_step)
            if isinstance(event, Generated):
                _append(self._samples, ({"step": event.step, **sample} for sample in event.samples))
                return
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            _append(self._path, [{"time": now, **event.as_dict()}])
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; make room, then go on with --resume"
            ) from error

    def close(self) -> None:
        """Every line was closed when it was written."""


def _append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """All of the lines or, where there is no room, none."""
    text = "".join(dumps(line) + "\n" for line in lines)
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def _drop_part(path: Path) -> None:
    """Take out the end of a line that a kill cut off, or the next one would go on with it."""
    text = path.read_bytes() if path.exists() else b""
    whole = text.rfind(b"\n") + 1
    if whole == len(text):
        return
    try:
        json.loads(text[whole:])
    except ValueError:
        os.truncate(path, whole)
    else:  # an editor took the line's end
        with path.open("ab") as file:
            file.write(b"\n")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, numbers as they were sent; a line cut off by a kill or a full disk is left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(json.JSONDecodeError):
                yield restored(json.loads(line))


def _cut_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [event for event in read_events(path) if event.get("step", 0) <= step]
    write_whole(path, "".join(dumps(event) + "\n" for event in kept))
