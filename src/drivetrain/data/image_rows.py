"""Copies image bytes of large parquet files to arrays on disk, in blocks of rows once a machine, and maps them.

A parquet file compresses pages of many rows, so that a single picture cannot be read from it alone. The copy takes
about as much disk as the files do.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from drivetrain.data.array_store import Store, Writer, check_room, stored
from drivetrain.errors import problem
from drivetrain.runtime.progress_line import ProgressLine

FORMAT = 1
ROWS = 256  # read at once
Encoded = Callable[[pyarrow.ChunkedArray, int], pyarrow.ChunkedArray]  # a column and the rows before it → its bytes


class StoredImages:
    """N encoded images, one after the other."""

    def __init__(self, store: Store) -> None:
        self._bytes, self._ends = store.array("bytes"), store.array("ends")

    def __len__(self) -> int:
        return len(self._ends)

    def open(self, index: int) -> io.BytesIO:
        start = int(self._ends[index - 1]) if index else 0
        return io.BytesIO(self._bytes[start : int(self._ends[index])].tobytes())


def stored_images(
    files: Sequence[Path], column: str, encoded: Encoded, cache: Path, field: str
) -> tuple[StoredImages, str, str | None]:
    """Returns the images of a column of parquet files, a key that identifies them, and a warning if the cache cannot be
    used.

    encoded: refuses values that are no image bytes. Raises UserError for files that change meanwhile, and for a full
    disk.
    """
    states = _states(files)
    key = blake2b(repr((FORMAT, column, states)).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    def build(folder: Path) -> None:
        size = sum(size for _, size, _ in states)
        check_room(folder, size, "the images of the parquet files")
        shown, rows = ProgressLine("copying images", size), 0
        with Writer(folder) as writer:
            for file, (_, file_size, _) in zip(files, states, strict=True):
                with pyarrow.parquet.ParquetFile(file) as opened:
                    total = max(1, opened.metadata.num_rows)
                    for batch in opened.iter_batches(batch_size=ROWS, columns=[column]):
                        images = encoded(pyarrow.chunked_array([batch.column(0)]), rows).to_pylist()
                        writer.append("bytes", np.frombuffer(b"".join(images), np.uint8))
                        writer.append_ends("ends", [len(image) for image in images])
                        rows += len(images)
                        shown.add(file_size * len(images) // total)
            shown.end()
            if _states(files) != states:  # before the store is finished, which no later start would doubt
                raise problem(field, "a parquet file changed while it was read", "start again when all are written")
            writer.finish({"rows": rows})

    store, warning = stored(cache, f"images-{key}", build)
    return StoredImages(store), key, warning


def _states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    found = [(str(file.resolve()), os.stat(file)) for file in files]
    return [(path, state.st_size, state.st_mtime_ns) for path, state in found]
