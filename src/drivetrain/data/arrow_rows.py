"""Reads rows of parquet and Arrow files; when streamed, a piece (row group or record batch) at a time.

pyarrow is imported where a file is opened: other kinds of rows are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from drivetrain.errors import UserError, problem

T = TypeVar("T")
FILE_MAGIC = b"ARROW1"  # of an IPC file; an IPC stream has none


class ArrowRows:
    """Rows of consecutive pieces of the passed sizes. The last piece that was needed stays in memory.

    read_piece: number → table or record batch. It opens the file anew, so that forked processes share no position.
    """

    def __init__(
        self, path: Path, name: str, field: str, sizes: Sequence[int], read_piece: Callable[[int], Any]
    ) -> None:
        self._path, self._name, self._field = path, name, field
        self._starts = np.cumsum([0, *sizes])
        self._read_piece = read_piece
        self._held: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        parts = self._parts(start, stop, lambda part: list(map(without_inner_nulls, part.to_pylist())))
        return [row for part in parts for row in part]

    def slices(self, start: int, stop: int) -> list[Any]:
        """Returns the rows as Arrow's own tables or record batches."""
        return self._parts(start, stop, lambda part: part)

    def _parts(self, start: int, stop: int, read: Callable[[Any], T]) -> list[T]:
        found: list[T] = []
        stop = min(stop, len(self))
        while start < stop:
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            end = min(stop, int(self._starts[number + 1]))
            try:
                found.append(read(self._piece(number).slice(start - int(self._starts[number]), end - start)))
            except Exception as error:  # pyarrow raises many kinds; what is damaged may be any part of the file
                raise _unreadable(self._path, self._field, error, f" at {self.where(start)}") from None
            start = end
        return found

    def where(self, index: int) -> str:
        return f"{self._name} row {index + 1}"

    def _piece(self, number: int) -> Any:
        held = self._held
        if held is None or held[0] != number:
            self._held = held = (number, self._read_piece(number))
        return held[1]


def without_inner_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Removes nulls inside of a column: a struct has every field that any row has, null where the row had none, as JSON
    cannot tell. A map, which pyarrow returns as pairs, becomes an object, unless it is empty: an empty one looks like a
    list."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(inner, tuple) for inner in value):  # a map: the keys are this row's own
        return {key: _without_nulls(inner) for key, inner in value}
    return [_without_nulls(inner) for inner in value]


def read_parquet(path: Path, name: str, field: str, stream: bool) -> ArrowRows:
    """Reads row groups one by one. Raises UserError if it is no parquet file, or truncated."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            sizes, read_piece = _row_groups(path, opened.metadata) if stream else _one_piece(opened.read())
    except Exception as error:  # pyarrow raises many kinds
        raise _unreadable(path, field, error) from None
    _refuse_twins(names, path, field)
    return ArrowRows(path, name, field, sizes, read_piece)


def read_arrow(path: Path, name: str, field: str, stream: bool) -> ArrowRows:
    """Reads an IPC file (Feather 2 too) or IPC stream, by record batches.

    A stream with dictionaries is read whole: its batches cannot be read without those before them.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as opened:
            is_file = opened.read(len(FILE_MAGIC)) == FILE_MAGIC
        opener, batches = (pa.ipc.open_file, _file_batches) if is_file else (pa.ipc.open_stream, _stream_batches)
        with pa.memory_map(str(path)) as source, opener(source) as reader:
            schema = reader.schema
            whole = not stream or (not is_file and "dictionary<" in str(schema))
            sizes, read_piece = _one_piece(reader.read_all()) if whole else batches(path, schema)
    except Exception as error:  # pyarrow raises many kinds
        raise _unreadable(path, field, error) from None
    _refuse_twins(schema.names, path, field)
    return ArrowRows(path, name, field, sizes, read_piece)


def parquet_blocks(path: Path, field: str, rows: int) -> Iterator[list[dict[str, Any]]]:
    """Yields so many rows at a time, however large the file's row groups are."""
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as opened:
            _refuse_twins(opened.schema_arrow.names, path, field)
            for batch in opened.iter_batches(batch_size=rows):
                yield list(map(without_inner_nulls, batch.to_pylist()))
                number += batch.num_rows
    except Exception as error:  # pyarrow raises many kinds
        if isinstance(error, UserError):
            raise
        raise _unreadable(path, field, error, f" at row {number + 1}" if number else "") from None


def arrow_blocks(path: Path, field: str, rows: int) -> Iterator[list[dict[str, Any]]]:
    """Yields so many rows at a time from an Arrow file, which is mapped."""
    held = read_arrow(path, path.name, field, stream=True)
    for start in range(0, len(held), rows):
        yield held.read(start, start + rows)


# --- sizes of a file's pieces, and a reader of one -------------------------------------------------------------------

Pieces = tuple[list[int], Callable[[int], Any]]


def _one_piece(table: Any) -> Pieces:
    return [table.num_rows], partial(_table, table)


def _table(table: Any, number: int) -> Any:
    del number  # the only one
    return table


def _row_groups(path: Path, metadata: Any) -> Pieces:
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return sizes, partial(_row_group, path, metadata)


def _row_group(path: Path, metadata: Any, number: int) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, metadata=metadata) as opened:
        return opened.read_row_group(number)


def _file_batches(path: Path, schema: Any) -> Pieces:
    import pyarrow as pa

    del schema  # the file says it again
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    return sizes, partial(_file_batch, path)


def _file_batch(path: Path, number: int) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.get_batch(number)


def _stream_batches(path: Path, schema: Any) -> Pieces:
    """Finds the batches of a stream in one pass over its headers, since it has no table of contents."""
    import pyarrow as pa

    places: list[int] = []
    sizes: list[int] = []
    with pa.memory_map(str(path)) as source:
        pa.ipc.read_message(source)  # the schema
        while True:
            place = source.tell()
            try:
                message = pa.ipc.read_message(source)
            except EOFError:
                return sizes, partial(_stream_batch, path, schema, places)
            places.append(place)
            sizes.append(pa.ipc.read_record_batch(message, schema).num_rows)


def _stream_batch(path: Path, schema: Any, places: Sequence[int], number: int) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        source.seek(places[number])
        return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def _refuse_twins(names: Sequence[str], path: Path, field: str) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise problem(field, f"{path} has two columns {twins[0]!r}", "name each column differently")


def _unreadable(path: Path, field: str, error: Exception, place: str = "") -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return problem(field, f"{path} cannot be read{place}: {reason}", "is the file whole? Copy or download it again")
