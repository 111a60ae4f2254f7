"""Reads rows of files of every kind once and forward, some at a time: the way large data sets are read.

Rows, their order, their numbers and their faults are those of `rows.open_rows`, which reads a whole file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.config.language_data import Documents
from drivetrain.data.arrow_rows import arrow_blocks, parquet_blocks
from drivetrain.data.encodings import refusal_of
from drivetrain.data.json_files import JSON_LINES, Row, broken_lines, json_objects, json_unit
from drivetrain.data.packed_files import PackedError, ending, open_text, text_bytes
from drivetrain.data.table_blocks import open_table
from drivetrain.errors import Problem, problem

AT_ONCE = 1_000  # rows of a block
TABLES = (".csv", ".tsv")
TEXTS = (".txt", ".md")
ARROW = (".parquet", ".arrow", ".feather")
ENDINGS = (".json", *JSON_LINES, *TABLES, *ARROW, *TEXTS)


@dataclass
class RowBlock:
    """Some rows of a file, and the number of each. faults: of rows that cannot be read, "line 3 is broken JSON"."""

    rows: list[Row] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    bytes: int = 0  # of the file, read for it


@dataclass(frozen=True)
class RowFile:
    """One file, and its name in messages. documents: how a text file is divided."""

    path: Path
    name: str
    field: str
    documents: Documents = "file"

    @cached_property
    def unit(self) -> str:
        """The unit that the numbers count; empty if the file is one row."""
        kind = ending(self.path)
        if kind in TEXTS:
            return "" if self.documents == "file" else "line" if self.documents == "line" else "document"
        return json_unit(self.path) if kind in (".json", *JSON_LINES) else "row"

    def where(self, number: int) -> str:
        return f"{self.name} {self.unit} {number}" if self.unit else self.name

    def blocks(self) -> Iterator[RowBlock]:
        """Yields blocks. Raises UserError for a file that cannot be read on."""
        try:
            yield from _KINDS[ending(self.path)](self)
        except PackedError as error:
            raise problem(self.field, str(error), "copy or download it again") from None
        except FileNotFoundError:
            raise problem(self.field, f"{self.path} vanished while it was read", "put it back") from None
        except OSError as error:
            raise problem(self.field, f"{self.path} cannot be read: {error.strerror}", "allow reading it") from None

    def broken(self, faults: Sequence[str]) -> Problem:
        return broken_lines(faults, self.path, self.field)


def _json(file: RowFile) -> Iterator[RowBlock]:
    block = RowBlock()
    for number, row, fault, size in json_objects(file.path, file.field):
        if row is None:
            block.faults.append(fault)
        else:
            block.rows.append(row)
            block.numbers.append(number)
        block.bytes += size
        if len(block.rows) + len(block.faults) == AT_ONCE:
            yield block
            block = RowBlock()
    yield block


def _separated(file: RowFile) -> Iterator[RowBlock]:
    path, number = str(file.path), 0
    try:
        table = open_table(file.path, file.field, True, [])
        names = [str(name) for name in table.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            why = f"{path} has two columns {twice[0]!r}"
            raise problem(file.field, why, "name each column differently in the first line")
        for columns in (block.columns for block in table.blocks(range(len(names)))):
            rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
            size = sum(len(value) for values in columns for value in values)
            yield RowBlock(rows, list(range(number + 1, number + len(rows) + 1)), bytes=size)
            number += len(rows)
    except Exception as error:
        if isinstance(error, PackedError):
            raise
        raise refusal_of(file.path, error, path, file.field) from None
    if not number:
        raise problem(file.field, f"{path} has a header but no rows", "give a file with rows")


def _of_arrow(blocks: Callable[[Path, str, int], Iterator[list[Row]]]) -> Callable[[RowFile], Iterator[RowBlock]]:
    def read(file: RowFile) -> Iterator[RowBlock]:
        number = 0
        for rows in blocks(file.path, file.field, AT_ONCE):
            yield RowBlock(rows, list(range(number + 1, number + len(rows) + 1)))
            number += len(rows)

    return read


# --- texts -----------------------------------------------------------------------------------------------------------


def _texts(file: RowFile) -> Iterator[RowBlock]:
    documents = _documents(file)
    while held := list(islice(documents, AT_ONCE)):
        rows: list[Row] = [{"text": text} for _, text in held]
        yield RowBlock(rows, [number for number, _ in held], bytes=sum(len(text) for _, text in held))


def _documents(file: RowFile) -> Iterator[tuple[int, str]]:
    """Yields number and text of each; for lines the line's own number, blank lines left out."""
    newline = "" if file.documents == "file" else None  # a whole file keeps its line ends
    try:
        with open_text(file.path, newline) as opened:
            if file.documents == "file":
                yield 1, opened.read()
            elif file.documents == "line":
                for number, line in enumerate(opened, start=1):
                    if line.strip():
                        yield number, line.rstrip("\n")
            else:
                pattern = r"\n[^\S\n]*\n\s*" if file.documents == "blank_line" else re.escape(file.documents.separator)
                parts = _parts(opened, re.compile(pattern), 1 if file.documents == "blank_line" else 0)
                yield from enumerate((text for text in parts if text.strip()), start=1)
    except UnicodeDecodeError as error:
        raise refusal_of(file.path, error, str(file.path), file.field) from None


def _parts(opened: Any, separator: re.Pattern[str], open_ended: int) -> Iterator[str]:
    """Yields the text between separators. open_ended: 1 if a separator may go on behind the text read so far."""
    rest, size = "", 1 << 20
    while part := opened.read(max(size, len(rest))):
        rest += part
        start = 0
        for found in separator.finditer(rest):
            if open_ended and found.end() == len(rest):
                break
            yield rest[start : found.start()]
            start = found.end()
        rest = rest[start:]
    *inner, last = separator.split(rest)
    yield from inner
    yield last


_KINDS: dict[str, Callable[[RowFile], Iterator[RowBlock]]] = {
    **dict.fromkeys((".json", *JSON_LINES), _json),
    **dict.fromkeys(TABLES, _separated),
    **dict.fromkeys(TEXTS, _texts),
    ".parquet": _of_arrow(parquet_blocks),
    ".arrow": _of_arrow(arrow_blocks),
    ".feather": _of_arrow(arrow_blocks),
}


class BlockRows:
    """The first rows of files that are read in blocks, with the interface of `rows.Rows`: enough to see what rows
    hold."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self.files = files

    @property
    def bytes(self) -> int:
        return sum(text_bytes(file.path) for file in self.files)

    def __len__(self) -> int:
        return sum(len(block.rows) for file in self.files for block in file.blocks())

    def __bool__(self) -> bool:
        return bool(self.read(0, 1))

    def read(self, start: int, stop: int) -> list[Row]:
        rows: list[Row] = []
        for file in self.files:
            for block in file.blocks():
                rows += block.rows
                if len(rows) >= stop:
                    return rows[start:stop]
        return rows[start:]

    def where(self, index: int) -> str:
        for file in self.files:
            for block in file.blocks():
                if index < len(block.rows):
                    return file.where(block.numbers[index])
                index -= len(block.rows)
        raise IndexError(index)
