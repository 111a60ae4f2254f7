"""The order of a streamed data set, and its rows by their place in it.

How it works ------------ A *pass* goes once through all rows. It takes the shards in an order of its own, drawn by
(seed, pass), end to end, and cuts what it reads into blocks of `buffer` rows; the rows of a block are shuffled among
themselves, drawn by (seed, pass, block). So the row at a place of a pass is a pure function of (seed, pass, place) and
of the files: ranks, workers, batches and kills do not matter. A row travels less than `buffer` places from where the
shards' order puts it, on average a third of that.

Every rank and every loader worker goes through the same order and parses and tokenises only its own rows. The work of
each on all rows is reading (from the machine's page cache, for all but the first), decompressing and finding line ends:
some hundred MB a second, against some MB a second of tokenising. Memory is two blocks of rows that are not parsed, in
each process.

The state of a stream is the number of samples drawn. To begin at another place, the shards before it are passed over by
their row counts, and the rows before it in its own shard are decompressed but not parsed. Counts are learned by
reading, kept in the cache, and found by counting where they are lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from drivetrain.data.streams.remote_shards import MOST_AHEAD
from drivetrain.data.streams.shards import Piece, Shard, count_all
from drivetrain.errors import RunError

KEPT = 2  # blocks: a batch may begin in one and end in the next


@dataclass(frozen=True)
class Travel:
    """How far rows are from their position in the shards' order. longest is of the block that was measured."""

    mean: float
    longest: int


@dataclass
class Block:
    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    order: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self.starts[-1]

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.starts.append(self.starts[-1] + len(piece))

    def at(self, place: int) -> tuple[Piece, int]:
        """Returns the piece that has the row at this place, and its number there."""
        index = int(self.order[place])
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.pieces[number], index - self.starts[number]


class ShuffledShards:
    """Rows by draw: draw d is the row at place d % rows of pass d // rows."""

    def __init__(
        self,
        shards: Sequence[Shard],
        buffer: int,
        seed: Sequence[int] | None,
        learn: Callable[[], None] = lambda: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """seed: None for the order of the files. learn: reads counts from elsewhere; keep: writes those found."""
        self._shards, self._buffer, self._seed = shards, buffer, seed
        self._learn, self._keep = learn, keep
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._rows: int | None = None
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}  # block → where it ends: shard's place, row

    @property
    def known(self) -> int | None:
        """The number of rows, if it is known without reading."""
        if self._rows is None and all(shard.known is not None for shard in self._shards):
            self._rows = sum(shard.count() for shard in self._shards)
        return self._rows

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def count(self) -> int:
        if self.known is None:
            self._learn()
        if self.known is None:
            count_all(self._shards)
            self._keep()
        found = self.known
        assert found is not None
        return found

    def order(self, turn: int) -> np.ndarray:
        """Returns (shards,), the numbers of the shards in the order in which a pass takes them."""
        if self._seed is None:
            return np.arange(len(self._shards))
        return np.random.default_rng([*self._seed, turn]).permutation(len(self._shards))

    def at(self, draw: int) -> tuple[Piece, int]:
        """Returns the piece of a shard that holds the row of a draw, and the row's number in it."""
        turn, place = self.place(draw)
        return self._block(turn, place // self._buffer).at(place % self._buffer)

    def place(self, draw: int) -> tuple[int, int]:
        """Returns (pass, place in it) of a draw. Counts nothing before the end of the first pass."""
        if self.known is None:
            number, place = divmod(draw, self._buffer)
            if place < len(self._block(0, number)):
                return 0, draw
        rows = self.count()
        if not rows:
            raise RunError("the stream has no rows left")
        return draw // rows, draw % rows

    def travel(self) -> Travel:
        """Measures how far the rows of the first pass's first block are from their positions."""
        order = self._block(0, 0).order
        moved = np.abs(order - np.arange(len(order)))
        return Travel(float(moved.mean()), int(moved.max())) if len(order) else Travel(0.0, 0)

    def _block(self, turn: int, number: int) -> Block:
        key = (turn, number)
        if key not in self._blocks:
            self._blocks[key] = self._read(turn, number)
            while len(self._blocks) > KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _read(self, turn: int, number: int) -> Block:
        order = self.order(turn)
        shard, row = self._beginning(turn, number, order)
        block = Block()
        while len(block) < self._buffer and shard < len(order):
            # this one too: it is asked for before the others
            for distance, coming in enumerate(order[shard : shard + 1 + MOST_AHEAD]):
                self._shards[coming].ahead(distance)
            wanted = self._buffer - len(block)
            piece = self._shards[order[shard]].piece(row, row + wanted)
            if len(piece):
                block.add(piece)
            row += len(piece)
            if len(piece) < wanted:
                shard, row = shard + 1, 0
        self._ends[turn, number] = (shard, row)
        self._keep()
        # NumPy takes [a, b] and [a, b, 0] for one seed, and the first of them draws the order of the shards
        generator = None if self._seed is None else np.random.default_rng([*self._seed, turn, number + 1])
        block.order = np.arange(len(block)) if generator is None else generator.permutation(len(block))
        return block

    def _beginning(self, turn: int, number: int, order: np.ndarray) -> tuple[int, int]:
        """Returns where a block begins: the position of its shard in the order, and the row in that."""
        if number == 0:
            return 0, 0
        if (turn, number - 1) in self._ends:
            return self._ends[turn, number - 1]
        row = number * self._buffer
        self._learn()
        for place, shard in enumerate(order):
            rows = self._shards[shard].count()
            if row < rows:
                return place, row
            row -= rows
        self._keep()
        return len(order), 0
