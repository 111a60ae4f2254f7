"""One streamed data set: rows become samples when they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.data.language.row_schema import RowError
from drivetrain.data.streams.shuffled import ShuffledShards

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StreamedRows:
    """Samples of rows. make: a row and its place → a sample; raises RowError if it holds none. unusable: returns a
    substitute for such a sample, or raises. As samples by index these are the rows in the stream's order, one pass of
    them."""

    title: str
    rows: ShuffledShards
    make: Callable[[Row, str], Any]
    unusable: Callable[[str, str], Any]
    identity: str = ""

    def __len__(self) -> int:
        return self.rows.count()

    def count(self) -> int:
        return self.rows.count()

    def load(self, draw: int, epoch: int = 0) -> Any:
        del epoch  # a draw of another pass has another number
        piece, index = self.rows.at(draw)
        try:
            return self.make(piece.row(index), piece.where(index))
        except RowError as error:
            return self.unusable(piece.where(index), str(error))

    def name(self, index: int) -> str:
        """Returns where the row of a draw stands: "chat.jsonl line 12"."""
        piece, place = self.rows.at(index)
        return piece.where(place)
