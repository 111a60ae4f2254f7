"""Keeps decoded pictures of one shape: in memory if they are few, else mapped from the cache, once for all ranks.

Decoding is the same work at each start and in each rank. From 16 MB on the pixels are therefore an array on disk, which
is found again as long as the files' sizes and times of change are the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np

from drivetrain.data.array_store import Writer, check_room, stored
from drivetrain.data.images import Unreadable
from drivetrain.errors import RunError

FORMAT = 1
LEAST_SHARED = 1 << 24  # bytes
PIECE = 64  # pictures a thread takes at a time
# below so many pixels a picture takes longer to open, in the interpreter, than to decode, outside its lock: 10,000 of
# 32 x 32 took 1.8 s on one thread and 2.7 s on two
THREADED_PIXELS = 128 * 128

Shape = tuple[int, ...]
Found = list[tuple[int, RunError]]  # indices of pictures that cannot be decoded, and why
Decode = Callable[[int], np.ndarray]
Check = Callable[[Found], None]


def kept_in_memory(decode: Decode, count: int, shape: Shape, check: Check) -> tuple[np.ndarray, Found]:
    """Returns (count, *shape) uint8, with zeros for pictures that cannot be decoded. check: raises an error if these
    are too many."""
    kept, found = np.zeros((count, *shape), dtype=np.uint8), list[tuple[int, RunError]]()
    for start, pixels, bad in _pieces(decode, count, shape):
        kept[start : start + len(pixels)] = pixels
        found += bad
    check(found)
    return kept, found


def kept_on_disk(
    decode: Decode, count: int, shape: Shape, check: Check, identity: str, cache: Path
) -> tuple[np.ndarray, Found, str | None]:
    """Returns the same array, mapped from a store that the first of all processes fills. identity: of the pictures'
    content.

    Returns a warning too if the cache cannot be used. Raises UserError from `check`; then nothing is kept.
    """
    key = blake2b(f"{FORMAT} {identity} {count} {shape}".encode(), digest_size=20).hexdigest()

    def build(folder: Path) -> None:
        check_room(folder, count * math.prod(shape), "decoding the images")
        found: Found = []
        try:
            with Writer(folder) as writer:
                for _, pixels, bad in _pieces(decode, count, shape):
                    writer.append("pixels", pixels)
                    found += bad
                check(found)
                writer.finish({"bad": [(index, str(error)) for index, error in found]})
        except BaseException:
            (folder / "pixels").unlink(missing_ok=True)  # no later start goes on from it
            raise

    store, warning = stored(cache, f"pictures-{key}", build)
    pixels = store.array("pixels").view(np.ndarray).reshape(count, *shape)
    return pixels, [(int(index), Unreadable(why)) for index, why in store.facts["bad"]], warning


def looked_at(look: Callable[[int], object], indices: Iterable[int]) -> Found:
    """Returns the faults that `look` finds, in order."""
    found = []
    for index in indices:
        try:
            look(index)
        except RunError as error:
            found.append((index, error))
    return found


def _pieces(decode: Decode, count: int, shape: Shape) -> Iterator[tuple[int, np.ndarray, Found]]:
    """Yields first index, pixels and faults of each piece."""

    def piece(part: range) -> tuple[int, np.ndarray, Found]:
        pixels = np.zeros((len(part), *shape), dtype=np.uint8)

        def decoded(index: int) -> None:
            pixels[index - part.start] = decode(index)

        return part.start, pixels, looked_at(decoded, part)

    parts = [range(start, min(start + PIECE, count)) for start in range(0, count, PIECE)]
    threads = (os.cpu_count() or 1) if math.prod(shape[:2]) >= THREADED_PIXELS else 1
    if threads == 1:
        yield from map(piece, parts)
        return
    ahead = 4 * threads  # pieces at once: `map` would decode all of them before the first is written
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(parts), ahead):
            yield from pool.map(piece, parts[start : start + ahead])


def fits(count: int, shape: Sequence[int], most_bytes: int) -> bool:
    return math.prod(shape) * count <= most_bytes
