"""A streamed data set as rows: its first ones, and parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from drivetrain.data.json_files import Row
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.streams.kept_counts import KeptCounts
from drivetrain.data.streams.line_shards import LineShard
from drivetrain.data.streams.remote_shards import RemoteRowsShard
from drivetrain.data.streams.shards import Piece, Shard, find_shards, part_of
from drivetrain.data.streams.shuffled import ShuffledShards
from drivetrain.errors import problem


class ShardRows:
    """The rows of all shards, one shard after the other. `read` and `where` are for its beginning."""

    def __init__(self, shards: Sequence[Shard], root: Path) -> None:
        self.shards = shards
        self._counts = KeptCounts(root, [shard for shard in shards if isinstance(shard, LineShard | RemoteRowsShard)])
        self._counts.read()

    def __len__(self) -> int:
        return self.in_order().count()

    def __bool__(self) -> bool:
        return any(len(shard.piece(0, 1)) for shard in self.shards)

    def read(self, start: int, stop: int) -> list[Row]:
        """Returns the readable ones of the rows."""
        rows = []
        for piece, index in self.found(start, stop):
            try:
                rows.append(piece.row(index))
            except RowError:  # reported when the row is used
                continue
        return rows

    def found(self, start: int, stop: int) -> list[tuple[Piece, int]]:
        """Returns rows start to stop - 1 as the pieces that hold them and their numbers there."""
        return [
            (piece, index)
            for shard in part_of(self.shards, start, stop)
            for piece in [shard.piece(0, stop - start)]
            for index in range(len(piece))
        ]

    def where(self, index: int) -> str:
        piece, number = self.in_order().at(index)
        return piece.where(number)

    def in_order(self, start: int = 0, stop: int | None = None) -> ShuffledShards:
        """Returns a part of the rows in the order of the files."""
        return self._stream(start, stop, 1_000, None)

    def shuffled(self, start: int, stop: int | None, buffer: int, seed: Sequence[int]) -> ShuffledShards:
        return self._stream(start, stop, buffer, seed)

    def _stream(self, start: int, stop: int | None, buffer: int, seed: Sequence[int] | None) -> ShuffledShards:
        shards = self.shards if start == 0 and stop is None else part_of(self.shards, start, stop)
        return ShuffledShards(shards, buffer, seed, self._counts.read, self._counts.write)

    @property
    def identity(self) -> str:
        """Returns names and sizes of the files, in short."""
        sizes = [_size(each) for each in self.shards]
        described = list(zip((each.name for each in self.shards), sizes, strict=True))
        return blake2b(repr(described).encode(), digest_size=6).hexdigest()


def _size(shard: Shard) -> int | None:
    """Returns the bytes of a shard's file, or the number of its rows."""
    if isinstance(shard, LineShard):
        return shard.size
    return shard.copy.size if isinstance(shard, RemoteRowsShard) else shard.known


def open_shards(path: str, field: str, root: Path) -> ShardRows:
    """Opens the shards. Raises UserError for files that cannot be read, or have no rows. root: where row counts are
    kept."""
    rows = ShardRows(find_shards(path, field), root)
    if not rows:
        raise problem(field, f"{path} has no rows", "give data with rows")
    return rows
