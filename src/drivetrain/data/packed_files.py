"""Reads compressed files like plain ones: gzip, bzip2, xz and zstd by the end of their name, as data.jsonl.gz."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

PACKED_BY = 4  # how many times as large ordinary text is than when it is packed: a guess, for sizes before reading
BUFFER = 1 << 20


class PackedError(ValueError):
    """A compressed file that is damaged, or cut short."""


def _zstd(path: Path) -> Any:
    import pyarrow as pa

    return pa.input_stream(str(path), compression="zstd")


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}


def is_packed(file: Path) -> bool:
    return file.suffix.lower() in OPENERS


def ending(file: Path) -> str:
    """Returns the kind of file, in lower case: ".jsonl" for data.jsonl and data.jsonl.gz."""
    return Path(file.stem if is_packed(file) else file.name).suffix.lower()


def text_bytes(file: Path) -> int:
    """Returns how many bytes are in the file; for a compressed one an estimate."""
    return file.stat().st_size * (PACKED_BY if is_packed(file) else 1)


def open_bytes(file: Path) -> BinaryIO:
    """Opens the file's content for reading. Reading raises PackedError where it is damaged."""
    if not is_packed(file):
        return file.open("rb")
    with file.open("rb"):  # the error of a file that is not there, or not to be read
        pass
    return cast(BinaryIO, io.BufferedReader(_Unpacked(file), BUFFER))


def open_text(file: Path, newline: str | None) -> TextIO:
    """Opens as UTF-8, with or without a byte order mark."""
    return io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline=newline)


def read_bytes(file: Path) -> bytes:
    with open_bytes(file) as opened:
        return opened.read()


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, with one kind of error for all kinds of damage."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened = OPENERS[file.suffix.lower()](file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._opened.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise PackedError(f"{self._file.name} is damaged or cut short: {reason}") from None
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()
