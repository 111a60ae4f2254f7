"""events.jsonl: every event of a run, a JSON object a line. samples.jsonl: prompts that were answered, one a line, at
evaluations or to learn from their rewards.

Other lines in these files (cut off by a kill, or edited) are never read as events and never removed: readers pass over
them with one warning, and a resumed run leaves them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.runtime import storage
from drivetrain.runtime.atomic_file import writing
from drivetrain.runtime.strict_json import dumps, restored
from drivetrain.tracking.events import EvaluationProgress, Event, Generated, RolledOut, RunStarted, Tracker, well_formed

LOG = logging.getLogger(__name__)
FILE_NAME = "events.jsonl"
SAMPLES = "samples.jsonl"
LONGEST = 2**24  # bytes of a line that is looked into
NAMED = 5  # odd lines, by their numbers


class JsonlTracker(Tracker):
    """Appends events to the files. When a run resumes, points past its first step are removed, so that the curve has
    each step once.

    JSON has no NaN or infinity: strict_json.py describes how such numbers are written. `read_events` restores them.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._samples = folder / FILE_NAME, folder / SAMPLES
        for path in (self._path, self._samples):
            with writing(path):
                storage.end_line(path)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            _cut_after(self._path, event.first_step, parsed)
            _cut_after(self._samples, event.first_step, _sample)
        if isinstance(event, EvaluationProgress):
            return
        if isinstance(event, Generated):
            _append(self._samples, ({"step": event.step, **sample} for sample in event.samples))
            return
        if isinstance(event, RolledOut):
            kind = {"step": event.step, "event": event.kind}
            _append(self._samples, ({**kind, **sample} for sample in event.samples))
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        _append(self._path, [{"time": now, **event.as_dict()}])

    def close(self) -> None:
        """Does nothing: every line was closed when it was written."""


def read_events(path: Path, warn: Callable[[str], None] = LOG.warning) -> Iterator[dict[str, Any]]:
    """Yields the events of a file, their fields of the types in events.py.

    warn: called at the end, once, with the numbers of the lines that are no events; those are passed over.
    """
    odd: list[int] = []
    for number, part, is_whole in _lines(path):
        event = parsed(part) if is_whole else None
        if event is not None:
            yield event
        elif part.strip() and number not in odd[-1:]:
            odd.append(number)
    if odd:
        warn(_named(path, odd))


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line, numbers as they were sent, or None."""
    found = _json(line)
    return well_formed(restored(found)) if isinstance(found, dict) else None


def parsed_lines(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the events of many lines, which are read as one list: that takes half the time. If one of them is no JSON,
    each is read for itself."""
    found = _json(b"[" + b",".join(lines) + b"]")
    if not isinstance(found, list) or len(found) != len(lines):
        found = [_json(line) for line in lines]
    for each in found:
        event = well_formed(restored(each)) if isinstance(each, dict) else None
        if event is not None:
            yield event


def odd_lines(path: Path) -> list[str]:
    """Returns the warning about a file of events, if there is anything to warn of."""
    found: list[str] = []
    for _ in read_events(path, found.append) if path.exists() else ():
        pass
    return found


def _named(path: Path, odd: list[int]) -> str:
    more = f" and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
    numbers = f"line{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:NAMED]))}{more}"
    return f"{path}: {numbers} of it {'are no events' if len(odd) > 1 else 'is no event'} of a run, and passed over"


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (number, bytes, whether they are a whole line). A line longer than LONGEST comes in parts, all with its
    number."""
    number, begins = 1, True
    if not path.is_file():  # a pipe or a device would never end
        return
    with path.open("rb") as file:
        while part := file.readline(LONGEST):
            ends = part.endswith(b"\n")
            yield number, part, begins and (ends or len(part) < LONGEST)
            number, begins = number + ends, ends


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # also bytes that are no UTF-8, and numbers of thousands of digits
        return None


def _sample(line: bytes) -> dict[str, Any] | None:
    found = _json(line)
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def _append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Appends all of the lines or, where there is no room, none. Raises RunError if they cannot be written."""
    text = "".join(dumps(line) + "\n" for line in lines)
    with writing(path):
        storage.append(path, text.encode())


def _cut_after(path: Path, step: int, read: Callable[[bytes], dict[str, Any] | None]) -> None:
    """Removes what a run that begins after `step` reports again: lines of later steps, and answers that were made for
    the steps after it. Lines in which `read` finds nothing stay."""
    if path.exists():
        with writing(path):
            storage.rewrite(path, _until(path, step, read))


def _until(path: Path, step: int, read: Callable[[bytes], dict[str, Any] | None]) -> Iterator[bytes]:
    for _, part, is_whole in _lines(path):
        found = read(part) if is_whole else None
        made_after = found is not None and found.get("event") == RolledOut.kind
        if found is None or found.get("step", 0) + made_after <= step:
            yield part
