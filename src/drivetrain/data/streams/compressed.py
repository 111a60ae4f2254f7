"""Files opened for reading, decompressed by their ending."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

AT_ONCE = 1 << 20
# what decompressors raise for damaged or cut files; OSError for gzip's and zstd's
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException)


def _zstd(path: Path) -> Any:
    """Python's own library has none before 3.14."""
    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


def content_ending(path: Path) -> str:
    """Return the ending of what is compressed, or of the file itself: ".jsonl" of "a.jsonl.gz"."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def open_decompressed(path: Path) -> BinaryIO:
    """Return the file's content as a buffered stream. Reading it raises one of `DAMAGED` where it is damaged."""
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return path.open("rb", buffering=AT_ONCE)
    return cast(BinaryIO, io.BufferedReader(opener(path), AT_ONCE))
