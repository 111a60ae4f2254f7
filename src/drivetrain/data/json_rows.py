"""Reads rows of JSON and JSON Lines files."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.data.json_files import Row, broken_lines, json_objects, json_unit, numbered_lines, row_of_line
from drivetrain.errors import Problem, UserError, problem

EVERY = 1_000  # rows between two remembered places of a streamed file


@dataclass(frozen=True)
class HeldRows:
    """Rows in memory. numbers: (N,), the position of each in its file, from 1; None: consecutive."""

    name: str
    rows: Sequence[Row]
    unit: str = "row"
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> list[Row]:
        return list(self.rows[start:stop])

    def where(self, index: int) -> str:
        number = index + 1 if self.numbers is None else self.numbers[index]
        return f"{self.name} {self.unit} {number}" if self.unit else self.name


class BrokenRows(UserError):
    """Some rows cannot be read. rows: the others, so that their problems can be reported at the same time."""

    def __init__(self, problems: Sequence[Problem], rows: Any) -> None:
        super().__init__(problems)
        self.rows = rows


def read_json(path: Path, name: str, field: str) -> HeldRows:
    """Reads a whole JSON file (json_files.json_objects). Raises BrokenRows with the rows or lines that are none."""
    rows: list[Row] = []
    numbers, faults = array("q"), []
    for number, row, fault, _ in json_objects(path, field):
        if row is None:
            faults.append(fault)
        else:
            rows.append(row)
            numbers.append(number)
    held = HeldRows(name, rows, json_unit(path), numbers)
    if faults:
        raise BrokenRows([broken_lines(faults, path, field)], held)
    return held


class StreamedJsonLines:
    """Rows of a file of any size, each read at its use. Beyond the first thousand, one pass records where every
    thousandth begins."""

    def __init__(self, path: Path, name: str, field: str) -> None:
        self._path, self._name, self._field = path, name, field
        with path.open("rb"):  # OSError here, where all that cannot be opened is reported together
            pass
        self._next = (0, 0, 0)  # behind the last row that was read, as in _places
        self._known: tuple[int, list[int]] = (0, [])  # the first of the rows read last, and the line of each

    @cached_property
    def _index(self) -> tuple[list[tuple[int, int, int]], int]:
        """Finds where every thousandth row begins, and counts the rows.

        Returns (row, first byte, blank lines before it included, line - 1) of those rows, and the number of all rows.
        """
        places, length, before = [], 0, (0, 0)
        with self._path.open("rb") as opened:
            for number, end, _ in numbered_lines(opened):
                if length % EVERY == 0:
                    places.append((length, *before))
                length += 1
                before = (end, number)
        return places, length

    def __len__(self) -> int:
        return self._index[1]

    def __bool__(self) -> bool:
        """Returns whether there are rows, without the length."""
        return next(self._lines_from(0, 1), None) is not None

    def read(self, start: int, stop: int) -> list[Row]:
        is_beginning = stop <= EVERY and "_index" not in self.__dict__
        stop = stop if is_beginning else min(stop, len(self))
        rows: list[Row] = []
        numbers: list[int] = []
        broken: list[str] = []
        for number, end, line in self._lines_from(start, stop):
            numbers.append(number)
            place = (start + len(numbers), end, number)
            row, fault = row_of_line(line, number, self._path, self._field)
            if row is None:
                broken.append(fault)
            else:
                rows.append(row)
        if broken:
            raise UserError([broken_lines(broken, self._path, self._field)])
        if len(rows) < stop - start and not is_beginning:
            why = f"{self._path} has fewer lines than when it was opened"
            raise problem(self._field, why, "leave data alone while they are read")
        if rows:
            self._next, self._known = place, (start, numbers)
        return rows

    def where(self, index: int) -> str:
        first, numbers = self._known
        known = first <= index < first + len(numbers)
        number = numbers[index - first] if known else next(self._lines_from(index, index + 1))[0]
        return f"{self._name} line {number}"

    def _lines_from(self, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields, like `numbered_lines`, the rows start to stop - 1."""
        if start >= stop:
            return
        place = self._index[0][start // EVERY] if start >= EVERY else (0, 0, 0)
        row, offset, line = self._next if place[0] < self._next[0] <= start else place
        with self._path.open("rb") as opened:  # anew each time: an open file's position is shared by forked processes
            opened.seek(offset)
            yield from islice(numbered_lines(opened, line, offset), start - row, stop - row)
