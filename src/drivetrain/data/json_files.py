"""Reads JSON files a row at a time: JSON Lines, and one list of objects. All rows of JSON come from here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from drivetrain.data.encodings import not_utf8, refusal_of
from drivetrain.data.json_array import NotAListError, objects
from drivetrain.data.long_text import BYTE_ORDER_MARK
from drivetrain.data.packed_files import PackedError, ending, open_bytes, open_text
from drivetrain.errors import Problem, UserError, problem

Row = dict[str, Any]

JSON_LINES = (".jsonl", ".ndjson")
NO_LIST = 'give a list of objects, {"data": [...]} with no other list, or one object a line in a .jsonl file'
LONGEST_FIRST = 16 << 20  # bytes of a first line that is looked at to tell lines from one list


class Parsed(NamedTuple):
    """A row and its number in the file, from 1; or, without a row, what is wrong there ("line 3 is broken JSON")."""

    number: int
    row: Row | None
    fault: str
    size: int  # bytes, or characters of a list, that were read for it


def json_unit(path: Path) -> str:
    """Returns what the numbers of a JSON file's rows count: lines, or rows of its list."""
    return "line" if ending(path) in JSON_LINES or is_json_lines(path) else "row"


def json_objects(path: Path, field: str) -> Iterator[Parsed]:
    """Yields the rows of JSON Lines, of a list of objects, or of {"data": the list}. Raises UserError if the file
    cannot be read on."""
    return _objects_of_lines(path, field) if json_unit(path) == "line" else _objects_of_list(path, field)


def _objects_of_lines(path: Path, field: str) -> Iterator[Parsed]:
    before = 0
    with open_bytes(path) as opened:
        for number, end, line in numbered_lines(opened):
            row, fault = row_of_line(line, number, path, field)
            yield Parsed(number, row, fault, end - before)
            before = end


def _objects_of_list(path: Path, field: str) -> Iterator[Parsed]:
    with open_text(path, None) as opened:
        try:
            for number, (row, source, size) in enumerate(objects(opened), start=1):
                fault = fault_of(row, escaped="\\ud" in source or "\\uD" in source)
                yield Parsed(number, None, f"row {number} {fault}", size) if fault else Parsed(number, row, "", size)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise problem(field, f"{path} is broken JSON at {place}: {error.msg}", "correct the file") from None
        except NotAListError:
            raise problem(field, f"{path} holds no list of objects", NO_LIST) from None
        except UnicodeDecodeError as error:
            raise refusal_of(path, error, str(path), field) from None
        except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
            if isinstance(error, PackedError):
                raise
            raise problem(field, f"{path} cannot be read as JSON: {error}", "correct the file") from None


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


def row_of_line(line: bytes, number: int, path: Path, field: str) -> tuple[Row | None, str]:
    """Returns the row of a line, or None and what is wrong with it, beginning with the line's number."""
    try:
        return parsed_line(line, number, path, field), ""
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        return None, f"line {number} {error}"


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
