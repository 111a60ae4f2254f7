"""The file of predictions: a row a sample, JSON Lines or CSV."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.errors import UserError, counted, problem
from drivetrain.inference.prediction_request import changes
from drivetrain.runtime.atomic_file import followed
from drivetrain.runtime.lock import holding

ENDINGS = (".jsonl", ".csv")


def check_place(path: Path, run: RunConfig, data: str | None) -> None:
    """Raises UserError if the file's name has no known ending, or predictions would replace anything but earlier
    ones."""
    if path.suffix not in ENDINGS:
        raise problem("--output", f"{path} does not end in .jsonl or .csv", "give one of these, or leave it out")
    given = [*texts(run.model_dump(mode="json")), *([] if data is None else [data])]
    if path.exists() and followed(path) in set(map(followed, given)):
        raise problem("--output", f"{path} is a file that the run is made from", "give another")
    if path.exists() and not _holds_predictions(path):
        raise problem("--output", f"{path} is there, and holds something else than predictions", "give another")


def _holds_predictions(path: Path) -> bool:
    """Returns whether a file is empty or holds predictions. A row begins with the sample's name."""
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        return not first or first.startswith("sample," if path.suffix == ".csv" else '{"sample":')
    except (OSError, ValueError):
        return False


class PredictionFile:
    """JSON Lines or, if the name ends in .csv, CSV: written aside, and renamed when all rows are there.

    JSON Lines that a kill or an error cut short stay aside, with the request they answer; the same request goes on with
    them. Another one is refused, unless it is to overwrite them. While one process writes, any other is refused.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self._path = followed(path)  # a link stays
        self._aside = self._path.with_name(f".{self._path.name}.partial")
        self._request = self._path.with_name(f".{self._path.name}.request.json")
        self._lock = self._path.with_name(f".{self._path.name}.lock")
        self._held: contextlib.ExitStack | None = None  # while this process alone may write; what ends that
        self._is_csv = path.suffix == ".csv"
        self._overwrite = overwrite
        self._done = 0
        self._has_begun = False  # until then, what lies aside is an earlier prediction's

    def begin(self, request: dict[str, Any]) -> int:
        """Returns the number of rows that there are already of the same request, and keeps other processes from writing
        the file until `write` ends. Raises UserError for the rows of another request, and where another process
        writes the file."""
        try:
            with self._reported():
                self._hold()
                earlier = self._earlier()
                self._done = 0 if self._is_csv or self._overwrite else _whole_lines(self._aside)
                if self._done and earlier != request:
                    raise self._taken(changes(earlier, request))
                self._has_begun = True
                if not self._done:
                    self._forget()
                if not self._is_csv:
                    self._request.write_text(json.dumps(request), encoding="utf-8")
        except BaseException:
            self._release()
            raise
        return self._done

    def left(self) -> str:
        """Describes, after a Ctrl-C, what there is of the rows and how to go on: the end of a sentence."""
        if self._is_csv:
            return ", and a .csv keeps no rows: a .jsonl does, and the same command goes on with them"
        try:
            with self._aside.open("rb") as file:
                count = sum(line.endswith(b"\n") for line in file)
        except OSError:
            count = 0
        if not count:
            return " before the first row was written"
        is_or_are = "is" if count == 1 else "are"
        but = " without --overwrite" if self._overwrite else ""
        return f": {counted(count, 'row')} {is_or_are} kept in {self._aside}, and the same command{but} goes on"

    def write(self, rows: Iterator[dict[str, Any]]) -> int:
        """Writes the rows that follow, and returns the number of all."""
        try:
            first = list(islice(rows, 1))  # before the file is opened: what makes the rows may call `begin`
            with self._reported():
                self._hold()
                self._has_begun = True
                if not self._done:
                    self._aside.write_bytes(b"")
                # at its end, wherever that is: what another process wrote is not written over, and shows
                file = self._aside.open("a", encoding="utf-8", newline="")
            lines = _Lines(file, self._done)
            try:
                write = _csv_writer(lines) if self._is_csv else _json_writer(lines)
                for row in chain(first, rows):  # an OSError of what makes the rows is none of this file's
                    with self._reported():
                        write(row)
                    self._done += 1
                with self._reported():
                    file.flush()
            finally:
                with contextlib.suppress(OSError):  # of what a failed flush left: it was reported
                    file.close()
            with self._reported():
                self._check_lines(lines.count)
                self._aside.replace(self._path)
                self._request.unlink(missing_ok=True)
        except BaseException:
            if self._has_begun and not (self._done and self._request.exists()):
                self._forget()
            raise
        finally:
            self._release()
        return self._done

    def _hold(self) -> None:
        """Keeps other processes from writing the file. Raises UserError if one writes it already."""
        if self._held is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(holding(self._lock, self._in_use))
            self._held = stack.pop_all()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _in_use(self, who: str | None) -> UserError:
        why = f"another process is writing {self._path}{f' ({who})' if who else ''}"
        return problem("--output", why, "wait until it ends, or give another file")

    def _check_lines(self, written: int) -> None:
        """Raises UserError if the file has not as many lines as were written: where file systems have no locks, another
        process may have written it too. No row of such a file is kept."""
        with self._aside.open("rb") as file:
            found = sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))
        if found != written:
            self._done = 0
            why = f"{self._aside} has {counted(found, 'line')}, and {written:,} were written"
            fix = "give the command again while no other one writes this file"
            raise problem("--output", f"{why}: another process wrote it too", fix)

    def _taken(self, why: str) -> UserError:
        rows = f"{counted(self._done, 'row')} of an interrupted prediction to {self._path.name}"
        fix = "repeat that command to go on with them, give another --output, or discard them with --overwrite"
        return problem("--output", f"{self._aside} holds {rows}, and this is another one: {why}", fix)

    def _earlier(self) -> Any:
        try:
            return json.loads(self._request.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _forget(self) -> None:
        for path in (self._aside, self._request):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{self._path} cannot be written: {error.strerror}"
            raise problem("--output", why, "give another file") from error


def _whole_lines(path: Path) -> int:
    """Cuts a line that a kill left half off a file; returns the number of those that remain."""
    try:
        with path.open("r+b") as file:
            count = end = 0
            for line in file:
                if line.endswith(b"\n"):
                    count, end = count + 1, end + len(line)
            file.truncate(end)
    except FileNotFoundError:
        return 0
    return count


class _Lines:
    """A text file, and how many lines it has if none but this process writes it."""

    def __init__(self, file: TextIO, count: int) -> None:
        self._file, self.count = file, count

    def write(self, text: str) -> int:
        self.count += text.count("\n")
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


def _json_writer(file: _Lines) -> Any:
    """Each row is in the file when its writing is over: a kill takes none of them."""

    def write(row: dict[str, Any]) -> None:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()

    return write


def _csv_writer(file: _Lines) -> Any:
    import csv

    writers: list[csv.DictWriter[str]] = []

    def write(row: dict[str, Any]) -> None:
        flat = _flat(row)
        if not writers:
            writers.append(csv.DictWriter(file, list(flat), restval=""))
            writers[0].writeheader()
        if new := [name for name in flat if name not in writers[0].fieldnames]:
            why = f"the row of {row.get('sample')} has {', '.join(new)}, which the first row has not"
            raise problem("--output", f"{why}: a CSV has the same columns in each", "give a .jsonl file")
        writers[0].writerow(flat)

    return write


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Makes a column for each value: {"probabilities": {"cat": 0.9}} becomes {"probabilities.cat": 0.9}. Raises
    UserError for two values that would have one column."""
    pairs: list[tuple[str, Any]] = []
    for name, value in row.items():
        nested = isinstance(value, dict)
        pairs += [(f"{name}.{key}", each) for key, each in value.items()] if nested else [(name, value)]
    flat = dict(pairs)
    if len(flat) < len(pairs):
        raise problem("--output", f"two values of the row of {row.get('sample')} have one name", "give a .jsonl file")
    return flat
