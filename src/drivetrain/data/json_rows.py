"""Reads rows of JSON and JSON Lines files."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.data.long_text import BYTE_ORDER_MARK
from drivetrain.data.packed_files import open_bytes, read_bytes
from drivetrain.data.tables import not_utf8
from drivetrain.errors import Problem, UserError, problem

Row = dict[str, Any]

NO_LIST = 'give a list of objects, {"data": [...]} with no other list, or one object a line in a .jsonl file'
LONGEST_FIRST = 16 << 20  # bytes of a first line that is looked at to tell lines from one list
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
    """Reads a list of objects, or {"data": the list}, or JSON Lines by another name. Raises UserError with row or
    line."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
        held = json.loads(text)
    except UnicodeDecodeError as error:
        raise not_utf8(error, str(path), field) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return read_json_lines(path, name, field)
        place = f"line {error.lineno}, column {error.colno}"
        raise problem(field, f"{path} is broken JSON at {place}: {error.msg}", "correct the file") from None
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise problem(field, f"{path} cannot be read as JSON: {error}", "correct the file") from None
    rows = _only_list(held)
    if rows is None:
        raise problem(field, f"{path} holds no list of objects", NO_LIST)
    escaped = "\\ud" in text.lower()
    faults = {number: fault for number, row in enumerate(rows, start=1) if (fault := fault_of(row, escaped))}
    if faults:
        whole = {number: row for number, row in enumerate(rows, start=1) if number not in faults}
        told = broken_lines([f"row {number} {fault}" for number, fault in faults.items()], path, field)
        raise BrokenRows([told], HeldRows(name, [*whole.values()], numbers=[*whole]))
    return HeldRows(name, rows)


def read_json_lines(path: Path, name: str, field: str) -> HeldRows:
    """One object a line; blank lines do not count. UserError names the lines that hold none."""
    rows: list[Row] = []
    numbers, broken = array("q"), []
    with open_bytes(path) as opened:
        for number, _, line in numbered_lines(opened):
            try:
                rows.append(parsed_line(line, number, path, field))
                numbers.append(number)
            except ValueError as error:
                if isinstance(error, UserError):
                    raise
                broken.append(f"line {number} {error}")
    held = HeldRows(name, rows, "line", numbers)
    if broken:
        raise BrokenRows([broken_lines(broken, path, field)], held)
    return held


def is_json_lines(path: Path) -> bool:
    """Returns whether a .json file holds an object a line: the first line is one, and more follows."""
    with open_bytes(path) as opened:
        line = opened.readline(LONGEST_FIRST).removeprefix(BYTE_ORDER_MARK)
        while line.isspace():
            line = opened.readline(LONGEST_FIRST)
        if not line.lstrip().startswith(b"{"):
            return False
        try:
            json.loads(line)
        except ValueError:
            return False
        return any(not part.isspace() for part in iter(lambda: opened.read(1 << 16), b""))


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
            try:
                rows.append(parsed_line(line, number, self._path, self._field))
            except ValueError as error:
                if isinstance(error, UserError):
                    raise
                broken.append(f"line {number} {error}")
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


def numbered_lines(opened: BinaryIO, line: int = 0, end: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yields (number, end in bytes, content) of every line with content from here on; line: number of the one before;
    end: where it ends.

    Lines end at \\n alone: inside JSON no text holds one, while U+2028 and its like are part of texts.
    """
    for number, content in enumerate(opened, start=line + 1):
        mark = not end and content.startswith(BYTE_ORDER_MARK)
        end += len(content)
        stripped = (content[len(BYTE_ORDER_MARK) :] if mark else content).strip()
        if stripped:
            yield number, end, stripped


def parsed_line(line: bytes, number: int, path: Path, field: str) -> Row:
    """Parses a line. Raises ValueError with what is wrong with it, and UserError if the whole file is of another
    encoding."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(error, str(path), field, number) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is broken JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    fault = fault_of(row, escaped=b"\\ud" in line.lower())
    if fault:
        raise ValueError(fault)
    assert isinstance(row, dict)
    return row


def _only_list(held: Any) -> list[Any] | None:
    """Returns the list that a JSON file is, or has under its only key "data"; None if neither."""
    if isinstance(held, dict) and sum(isinstance(value, list) for value in held.values()) == 1:
        held = held.get("data")
    return held if isinstance(held, list) else None


def fault_of(row: Any, escaped: bool) -> str | None:
    """Returns why a value cannot be a row, or None. escaped: whether its text escapes surrogates, so that a check is
    worthwhile."""
    if not isinstance(row, dict):
        return "holds no object"
    if escaped:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"holds half a surrogate pair ({error.object[error.start]!a}), which is no character"
    return None


def broken_lines(faults: Sequence[str], path: Path, field: str) -> Problem:
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    return Problem(field, f"{path} cannot be read: {shown}", "correct or remove them")
