"""Packs rows of one length: samples end to end, and padding behind them.

A GPU's compiled kernels and its allocator reuse known shapes: for rows of varying lengths they compile, tune and
allocate again. Rows of one length avoid that. Their price is padding, so samples are placed by best fit, and the length
is the one that costs least over the first steps of the very order in which the samples will come.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from drivetrain.data.row_shape import Rows

MULTIPLE = 64  # of which a row's tokens are one: tiles of matrix products
MOST_LENGTHS = 16  # tried
MOST_SAMPLES = 4096  # dealt to rows for each of them


def best_fit(tokens: np.ndarray, room: int, bound: int) -> list[np.ndarray]:
    """Assigns samples to rows of `room` tokens and at most `bound` samples: their positions, ascending, row by row.

    Best-fit decreasing (Johnson 1974): the longest first, each to the row which it leaves least room in; a new row
    where it fits in none. A sample longer than a row has one to itself.
    """
    rooms: list[tuple[int, int]] = []  # (tokens left, row), of rows that take more samples
    rows: list[list[int]] = []
    for position in np.argsort(-tokens, kind="stable").tolist():
        length = int(tokens[position])
        place = bisect.bisect_left(rooms, (length, -1))
        left, number = rooms.pop(place) if place < len(rooms) else (room, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(position)
        if len(rows[number]) < bound and left > length:
            bisect.insort(rooms, (left - length, number))
    return [np.array(sorted(row), dtype=np.int64) for row in rows]


def cheapest_rows(
    steps: Iterable[Sequence[np.ndarray]], longest: int, bound: int, overhead: int, most: int | None
) -> Rows:
    """Returns the rows that cost least over these steps; `tokens` is `most` if that is set.

    steps: for each step the lengths of every rank's samples. longest: of all samples. bound: the most samples of a row;
    a row has no more tokens than so many of the longest. overhead: what a row costs beside its tokens, in tokens.
    """
    seen: list[Sequence[np.ndarray]] = []
    for shares in steps:
        seen.append(shares)
        if sum(len(share) for each in seen for share in each) >= MOST_SAMPLES:
            break
    tried = _lengths(longest, bound, max(int(share.sum()) for shares in seen for share in shares))
    tokens = most or min(
        tried, key=lambda room: sum(_count(shares, room, bound) for shares in seen) * (room + overhead)
    )
    held = max(len(row) for shares in seen for share in shares for row in best_fit(share, tokens, bound))
    return Rows(tokens, min(bound, 2 * held), longest)


def filled_in_order(lengths: Sequence[int], rows: Rows, bound: int) -> list[range]:
    """Fills rows with samples in their order, as many in each range as a row takes and `bound` allows."""
    ranges, start, total = [], 0, 0
    for index, length in enumerate(lengths):
        full = index - start == min(bound, rows.samples)
        if index > start and (full or total + length > rows.tokens):
            ranges.append(range(start, index))
            start, total = index, 0
        total += length
    return [*ranges, range(start, len(lengths))]


def _lengths(longest: int, bound: int, largest: int) -> list[int]:
    """Returns multiples of MULTIPLE from the longest sample up to the largest share, or `bound` samples as long as
    that."""
    most = max(longest, min(bound * longest, largest))
    spread = np.geomspace(longest, most, MOST_LENGTHS)
    return sorted({math.ceil(length / MULTIPLE) * MULTIPLE for length in spread.round().astype(int).tolist()})


def _count(shares: Sequence[np.ndarray], room: int, bound: int) -> int:
    """Returns the number of rows that each rank runs: as many as the rank that needs most."""
    return max(len(best_fit(share, room, bound)) for share in shares)
