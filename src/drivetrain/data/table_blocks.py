"""Reads tables a block of rows at a time: CSV, TSV, JSON Lines and parquet files of any size in constant memory.

A block's columns are lists of plain values: strings for CSV and TSV, the values of JSON and parquet. The rows, their
order and the errors are those of `tables.read_table`, which reads a whole file.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from drivetrain.data.csv_records import Record, checked_records, lines_are_records, records, unquoted_records
from drivetrain.data.json_files import Row, broken_lines, json_objects, json_unit
from drivetrain.data.packed_files import ending, is_packed, open_text
from drivetrain.errors import UserError

LONGEST_FIELD = (1 << 31) - 1  # characters; what the csv module takes
ROWS = 2048  # a block has at most so many
IN_BLOCKS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


@dataclass
class Block:
    """Some rows. lines: the line of the file that each begins in; empty where the format has no lines. short: places
    within the block of rows with too few columns, which hold None."""

    columns: list[list[Any]]
    lines: list[int] = field(default_factory=list)
    short: list[int] = field(default_factory=list)


class Table(Protocol):
    """A file's columns. names: as in the file, or positions from 0 if it names none."""

    names: list[Any]

    def blocks(self, places: Sequence[int]) -> Iterator[Block]:
        """Yields the columns at these positions, some rows at a time, in the file's order."""
        ...


def open_table(file: Path, field: str, header: bool, wanted: Sequence[str | int], shorter: bool = False) -> Table:
    """Opens a table. wanted: the columns that will be read. shorter: yield rows of CSV and TSV with too few columns,
    which are an error otherwise. Raises the errors of the file's parser, which encodings.refusal_of turns into a
    UserError."""
    match ending(file):
        case ".parquet":
            return _Parquet(file)
        case ".jsonl" | ".json":
            return _Json(file, wanted, field)
    return _Separated(file, header, shorter)


def _in_blocks(rows: Iterator[tuple[int | None, Sequence[Any]]], places: Sequence[int], width: int) -> Iterator[Block]:
    """Yields blocks of the rows, each with its line, if it has one. width: of a row that is not short."""
    held = Block([[] for _ in places])
    for line, row in rows:
        is_short = len(row) < width
        if is_short:
            held.short.append(len(held.columns[0]))
        for values, place in zip(held.columns, places, strict=True):
            values.append(None if is_short else row[place])
        if line is not None:
            held.lines.append(line)
        if len(held.columns[0]) == ROWS:
            yield held
            held = Block([[] for _ in places])
    if held.columns[0]:
        yield held


class _Separated:
    """CSV and TSV. The first record decides how wide all are."""

    def __init__(self, file: Path, header: bool, shorter: bool) -> None:
        self._file, self._header, self._shorter = file, header, shorter
        self._separator = "\t" if ending(file) == ".tsv" else ","
        self._plain = ending(file) == ".tsv" and lines_are_records(self._text(None))
        first = next(self._records(), None)
        if first is None:
            raise ValueError("it holds blank lines only")
        self.names: list[Any] = first[1] if header else list(range(len(first[1])))

    def blocks(self, places: Sequence[int]) -> Iterator[Block]:
        width = len(self.names)
        rows = checked_records(self._records(), width, self._separator, self._shorter)
        if self._header:
            next(rows)
        return _in_blocks(rows, places, width)

    def _text(self, newline: str | None) -> TextIO:
        return open_text(self._file, newline)

    def _records(self) -> Iterator[Record]:
        if self._plain:
            return unquoted_records(self._text(None))
        longest = LONGEST_FIELD if is_packed(self._file) else self._file.stat().st_size
        return records(self._text(""), self._separator, longest)


class _Json:
    """JSON Lines, or a list of objects. A row that lacks a column has None there."""

    def __init__(self, file: Path, wanted: Sequence[str | int], field: str) -> None:
        """Reads until all wanted names were seen; if a position is wanted, to the end."""
        self._file, self._field, self._has_lines = file, field, json_unit(file) == "line"
        seen: dict[str, None] = {}
        with closing(self._rows()) as rows:
            for _, row in rows:
                seen |= dict.fromkeys(row)
                if all(name in seen for name in wanted):
                    break
        self.names: list[Any] = list(seen)

    def blocks(self, places: Sequence[int]) -> Iterator[Block]:
        names = [self.names[place] for place in places]
        rows = ((line, [row.get(name) for name in names]) for line, row in self._rows())
        return _in_blocks(rows, range(len(names)), len(names))

    def _rows(self) -> Generator[tuple[int | None, Row]]:
        """Yields each row, and its line. Raises UserError behind the last, with all that are none."""
        faults = []
        for number, row, fault, _ in json_objects(self._file, self._field):
            if row is None:
                faults.append(fault)
            else:
                yield number if self._has_lines else None, row
        if faults:
            raise UserError([broken_lines(faults, self._file, self._field)])


class _Parquet:
    """Parquet, by record batches. An index that pandas kept beside the columns is none of them."""

    def __init__(self, file: Path) -> None:
        import pyarrow.parquet as pq

        self._file = file
        with pq.ParquetFile(file) as opened:
            schema = opened.schema_arrow
        index = (schema.pandas_metadata or {}).get("index_columns", [])
        self.names: list[Any] = [name for name in schema.names if name not in [i for i in index if isinstance(i, str)]]

    def blocks(self, places: Sequence[int]) -> Iterator[Block]:
        import pyarrow.parquet as pq

        names = [self.names[place] for place in places]
        with pq.ParquetFile(self._file) as opened:
            for batch in opened.iter_batches(batch_size=ROWS, columns=list(dict.fromkeys(names))):
                yield Block([_plain(batch.column(name)) for name in names])


def _plain(column: Any) -> list[Any]:
    """Returns values as pandas does, with its texts of dates and decimals."""
    values: list[Any] = column.to_pandas().astype(object).tolist()
    return values
