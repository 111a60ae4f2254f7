"""Shards whose rows are lines: JSON Lines, and plain text with a text a line, compressed or not.

Rows that are passed over are not parsed, only split at line ends. A shard that is read from front to back stays open
between two calls, so that a compressed one is decompressed once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.data.encodings import not_utf8
from drivetrain.data.json_files import Row, parsed_line
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.long_text import BYTE_ORDER_MARK
from drivetrain.data.packed_files import PackedError, open_bytes
from drivetrain.data.streams.remote_shards import ShardCopy
from drivetrain.errors import UserError, problem


@dataclass(frozen=True)
class LinePiece:
    """Some rows of a shard, not parsed. numbers: line of each, from 1."""

    shard: LineShard
    lines: list[bytes]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> Row:
        """Parses one row. Raises RowError with what is wrong with it, and UserError if the file is of another
        encoding."""
        return self.shard.parsed(self.lines[index], self.numbers[index])

    def where(self, index: int) -> str:
        return f"{self.shard.name} line {self.numbers[index]}"


class LineShard:
    """A shard of lines; blank lines are no rows. known: the number of rows, once it is."""

    def __init__(self, path: Path, name: str, field: str, is_text: bool, copy: ShardCopy | None = None) -> None:
        """copy: that of a shard in a store, which `path` names."""
        self.copy = copy
        self.path, self.name, self._field, self._is_text = path, name, field, is_text
        self.known: int | None = None
        # what is open: the process that opened it (a position is shared with forked ones), and the row that comes next
        self._open: tuple[int, int, Iterator[tuple[int, bytes]], BinaryIO] | None = None

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.copy is None else self.copy.size

    def ahead(self, distance: int) -> None:
        """Has the shard brought to this machine, if it lies in a store. distance: as in `ShardCopy.ahead`."""
        if self.copy is not None:
            self.copy.ahead(distance)

    def count(self) -> int:
        """Counts the rows without parsing them; a file that was counted is not read again."""
        if self.known is None:
            with self._faults(0):
                lines, opened = self._lines()
                with opened:
                    self.known = sum(1 for _ in lines)
        return self.known

    def piece(self, start: int, stop: int) -> LinePiece:
        """Returns rows start to stop - 1, or fewer where the shard ends. Raises UserError for a file that is damaged,
        that vanished, or that has other rows than were counted."""
        numbers: list[int] = []
        found: list[bytes] = []
        if self.known is not None and start >= self.known:
            self._close()
            return LinePiece(self, found, numbers)
        with self._faults(start):
            lines, opened = self._from(start)
            for number, line in islice(lines, stop - start):
                numbers.append(number)
                found.append(line)
            if len(found) == stop - start:
                self._open = (os.getpid(), stop, lines, opened)
            else:
                opened.close()
                self._learn(start + len(found))
        return LinePiece(self, found, numbers)

    def parsed(self, line: bytes, number: int) -> Row:
        if not self._is_text:
            try:
                return parsed_line(line, number, self.path, self._field)
            except UserError:
                raise
            except ValueError as error:
                raise RowError(f"it {error}") from None
        try:
            return {"text": line.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise not_utf8(error, str(self.path), self._field, number) from None

    def _from(self, start: int) -> tuple[Iterator[tuple[int, bytes]], BinaryIO]:
        """Returns the open file if it stands at or before that row here, else the file from its beginning."""
        held = self._open
        if held is not None and held[0] == os.getpid() and held[1] <= start:
            place, lines, opened = held[1:]
            self._open = None
        else:
            self._close()
            place, (lines, opened) = 0, self._lines()
        skipped = sum(1 for _ in islice(lines, start - place))
        if skipped < start - place:
            self._learn(place + skipped)
        return lines, opened

    def _close(self) -> None:
        held, self._open = self._open, None
        if held is not None:  # of another process too: the descriptor is this one's own
            held[3].close()

    def __del__(self) -> None:
        self._close()

    def _lines(self) -> tuple[Iterator[tuple[int, bytes]], BinaryIO]:
        opened = open_bytes(self.path) if self.copy is None else self.copy.read(open_bytes)
        return _with_content(opened), opened

    def _learn(self, rows: int) -> None:
        if self.known not in (None, rows):
            why = f"{self.path} has {rows:,} rows, and {self.known:,} when they were counted"
            raise problem(self._field, why, "leave data alone while they are read")
        self.known = rows

    def _faults(self, start: int) -> _Faults:
        return _Faults(self.path, self._field, start)


@dataclass(frozen=True)
class _Faults:
    """Turns errors of reading into an error with the file and the approximate place."""

    path: Path
    field: str
    start: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or isinstance(error, UserError):
            return
        if isinstance(error, FileNotFoundError):
            raise problem(self.field, f"{self.path} vanished", "put it back, and go on with --resume") from None
        if isinstance(error, PermissionError):
            raise problem(self.field, f"{self.path} cannot be read: {error.strerror}", "allow reading it") from None
        if isinstance(error, OSError | PackedError):
            kind = "compressed file is damaged or cut short" if isinstance(error, PackedError) else "cannot be read"
            why = f"{self.path}: {kind} behind row {self.start:,}: {error}"
            raise problem(self.field, why, "copy or download it again, and go on with --resume") from None


def _with_content(opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of every line with content. Lines end at \\n alone: U+2028 and its like are part of
    texts."""
    for number, line in enumerate(opened, start=1):
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line[len(BYTE_ORDER_MARK) :]
        stripped = line.strip()
        if stripped:
            yield number, stripped
