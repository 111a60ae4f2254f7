"""The curves of runs that a page looks at: points of events.jsonl, of which each request gets those that it lacks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from drivetrain.tracking.columns import MEASURED, Curve, thinned
from drivetrain.tracking.jsonl import FILE_NAME

KEPT = 6  # runs


class Curves:
    """The curves that were looked at last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, Curve] = OrderedDict()
        self._lock = threading.Lock()

    def since(self, folder: Path, cursor: str | None, most: int) -> dict[str, Any]:
        """Returns points after a cursor that an earlier answer had, or all, at most about `most` of them."""
        with self._lock:
            curve = self._read(folder / FILE_NAME)
            if curve is None:
                return _answer("", True, {name: [] for name in MEASURED}, [], [], False, 0)
            size = len(curve.columns["step"])
            now = f"{curve.inode}-{size}-{len(curve.evaluations)}-{curve.num_marks}"
            first = _parsed(cursor, curve)
            if first is None:
                places = thinned(curve.columns["loss"], most)
                columns = {name: _json([column[at] for at in places]) for name, column in curve.columns.items()}
                return _answer(now, True, columns, curve.evaluations, list(curve.marks), len(places) < size, size)
            columns = {name: _json(column[first[0] :]) for name, column in curve.columns.items()}
            marks = curve.marks_after(first[2])
            return _answer(now, False, columns, curve.evaluations[first[1] :], marks, False, size)

    def in_words(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the last events of a run that say something in words: starts, warnings, anomalies, the end."""
        with self._lock:
            curve = self._read(folder / FILE_NAME)
            return [] if curve is None else [*curve.in_words]

    def forget(self, folder: Path) -> None:
        with self._lock:
            self._kept.pop(folder / FILE_NAME, None)

    def _read(self, file: Path) -> Curve | None:
        try:
            found = file.stat()
            curve = self._kept.get(file)
            if curve is None or curve.inode != found.st_ino or found.st_size < curve.end:
                curve = self._kept[file] = Curve(file, found.st_ino)
            if found.st_size > curve.end:
                curve.read_on()
        except OSError:
            self._kept.pop(file, None)
            return None
        self._kept.move_to_end(file)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return curve


def _answer(
    cursor: str,
    reset: bool,
    columns: dict[str, Any],
    evaluations: list[dict[str, Any]],
    marks: list[dict[str, Any]],
    is_thinned: bool,
    total: int,
) -> dict[str, Any]:
    found = {"evaluations": evaluations, "marks": marks, "thinned": is_thinned, "total": total}
    return {"cursor": cursor, "reset": reset, "columns": columns, **found}


def _parsed(cursor: str | None, curve: Curve) -> tuple[int, int, int] | None:
    """Returns how much of the curve a cursor has seen; None for another curve's."""
    parts = (cursor or "").split("-")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 20 for part in parts):
        return None
    inode, *seen = map(int, parts)
    lengths = (len(curve.columns["step"]), len(curve.evaluations), curve.num_marks)
    if inode != curve.inode or any(count > length for count, length in zip(seen, lengths, strict=True)):
        return None
    return seen[0], seen[1], seen[2]


def _json(values: Any) -> list[float | None]:
    """Returns numbers as JSON has them: null for NaN and infinity, which a plot shows as a gap."""
    return [value if value - value == 0 else None for value in values]
