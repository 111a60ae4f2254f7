"""The shards of a streamed data set: finds files by a path, a folder or a pattern, and the reader of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drivetrain.config.location import store_address
from drivetrain.data.arrow_rows import ArrowRows, without_inner_nulls
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.json_files import JSON_LINES, Row
from drivetrain.data.packed_files import PackedError, ending
from drivetrain.data.row_blocks import ENDINGS, TEXTS
from drivetrain.data.rows import Rows, open_file
from drivetrain.data.streams.line_shards import LineShard
from drivetrain.data.streams.remote_shards import RemoteRowsShard, ShardCopy, copies
from drivetrain.errors import Problem, UserError, problem
from drivetrain.runtime.hardware import usable_cores

SHOWN = 5
LINES = (*JSON_LINES, *TEXTS)  # may be compressed


class Piece(Protocol):
    """Consecutive rows of a shard."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Parses one row. Raises RowError with what is wrong with it."""
        ...

    def where(self, index: int) -> str: ...


class Shard(Protocol):
    """Rows that are read from front to back. known: how many, once that is known; count() finds it out."""

    @property
    def name(self) -> str: ...

    @property
    def known(self) -> int | None: ...

    def count(self) -> int: ...

    def piece(self, start: int, stop: int) -> Piece:
        """Returns rows start to stop - 1, or fewer where the shard ends."""
        ...

    def ahead(self, distance: int) -> None:
        """Prepares for reading it soon. distance: shards that are read before it."""
        ...


@dataclass(frozen=True)
class RowsPiece:
    """Rows without change. arrow: slices of tables, whose rows become Python's objects one by one."""

    name: Callable[[int], str]
    start: int
    rows: Sequence[Row] = ()
    arrow: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.rows) or sum(each.num_rows for each in self.arrow)

    def row(self, index: int) -> Row:
        if self.rows:
            return self.rows[index]
        for each in self.arrow:
            if index < each.num_rows:
                return without_inner_nulls(each.slice(index, 1).to_pylist()[0])
            index -= each.num_rows
        raise IndexError(index)

    def where(self, index: int) -> str:
        return self.name(self.start + index)


class RowsShard:
    """A shard of rows whose number is recorded: parquet, Arrow, a hub data set, and rows in memory."""

    def __init__(self, rows: Rows, name: str) -> None:
        self._rows, self.name = rows, name
        self.known: int | None = len(rows)

    def count(self) -> int:
        return len(self._rows)

    def piece(self, start: int, stop: int) -> RowsPiece:
        if isinstance(self._rows, ArrowRows):
            return RowsPiece(self._rows.where, start, arrow=self._rows.slices(start, stop))
        return RowsPiece(self._rows.where, start, self._rows.read(start, stop))

    def ahead(self, distance: int) -> None:
        pass


class PartOfShard:
    """Rows `start` to `stop` - 1 of a shard; stop: None for its end."""

    def __init__(self, shard: Shard, start: int, stop: int | None) -> None:
        self._shard, self._start, self._stop, self.name = shard, start, stop, shard.name

    @property
    def known(self) -> int | None:
        if self._stop is not None:
            return self._stop - self._start
        return None if self._shard.known is None else self._shard.known - self._start

    def count(self) -> int:
        return self._stop - self._start if self._stop is not None else self._shard.count() - self._start

    def piece(self, start: int, stop: int) -> Piece:
        end = self._start + stop if self._stop is None else min(self._start + stop, self._stop)
        return self._shard.piece(self._start + start, max(self._start + start, end))

    def ahead(self, distance: int) -> None:
        self._shard.ahead(distance)


def part_of(shards: Sequence[Shard], start: int, stop: int | None) -> list[Shard]:
    """Returns the rows start to stop - 1 of all shards in their order. Shards are counted as far as `stop`."""
    found: list[Shard] = []
    before = 0
    for shard in shards:
        if stop is not None and before >= stop:
            break
        bound = stop if stop is not None else start
        if before >= bound:
            found.append(shard)
            continue
        wanted = bound - before
        has = shard.known if shard.known is not None else len(shard.piece(0, wanted))
        first, last = max(0, start - before), None if stop is None else min(has, stop - before)
        if first < has:
            is_whole = first == 0 and (last is None or (shard.known is not None and last >= shard.known))
            found.append(shard if is_whole else PartOfShard(shard, first, last))
        elif has >= wanted and stop is None:
            found.append(PartOfShard(shard, first, None))
        before += has
    return found


def count_all(shards: Iterable[Shard]) -> list[int]:
    """Counts the rows of each, several at once: decompressing releases Python's lock."""
    listed = list(shards)
    if all(shard.known is not None for shard in listed):
        return [shard.count() for shard in listed]
    with ThreadPoolExecutor(max(1, min(8, usable_cores()))) as pool:
        return list(pool.map(lambda shard: shard.count(), listed))


# --- where they are --------------------------------------------------------------------------------------------------


def find_shards(path: str, field: str) -> list[Shard]:
    """Finds the shards of `path`: a file, a folder, or a pattern such as data/*.jsonl.gz. In the order of their names.

    Raises UserError for files that are missing, cannot be read in a stream, or are empty, all files at once.
    """
    if (address := store_address(path)) is not None:
        return [_remote(copy, name, field) for name, copy in copies(address, field).items()]
    shards: list[Shard] = []
    problems: list[Problem] = []
    for name, file in _files(path, field).items():
        try:
            shards.append(_shard(file, name, field))
        except UserError as error:
            problems.extend(error.problems)
        except OSError as error:
            problems.append(Problem(field, f"{file} cannot be read: {error.strerror}", "allow reading it"))
    if problems:
        if len(problems) > SHOWN:
            more = f"and {len(problems) - SHOWN} more files cannot be read"
            problems = [*problems[:SHOWN], Problem(field, more, "correct or remove them too")]
        raise UserError(problems)
    return shards


def _remote(copy: ShardCopy, name: str, field: str) -> Shard:
    if ending(copy.file) in LINES and copy.size:
        return LineShard(copy.file, name, field, ending(copy.file) in TEXTS, copy)
    return RemoteRowsShard(copy, name, field)


def _files(path: str, field: str) -> dict[str, Path]:
    if not is_there(path):
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    return data_files(path, field, ENDINGS)


def _shard(file: Path, name: str, field: str) -> Shard:
    if ending(file) in LINES and file.stat().st_size:
        return LineShard(file, name, field, is_text=ending(file) in TEXTS)
    try:
        return RowsShard(open_file(file, name, field, stream=True), name)
    except PackedError as error:
        raise problem(field, str(error), "copy or download it again") from None
