"""A text file of any size, read in pieces: never whole in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drivetrain.data.encodings import not_utf8
from drivetrain.data.source_files import SourceFile

LONG = 1 << 21  # bytes from which a file is tokenised in pieces: a tokenizer takes a hundred bytes for each
IN_PIECES = 16 << 20  # bytes from which a vocabulary is made of pieces cut at line ends, not of the text as a whole
PIECE = 1 << 18  # bytes: tokenizers take longer for each byte of a longer text
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LongText:
    """A file, as one text. Raises UserError if a piece that is read is not UTF-8."""

    path: Path
    field: str

    @cached_property
    def source(self) -> SourceFile:
        return SourceFile(self.path, self.field)

    @cached_property
    def start(self) -> int:
        with self.path.open("rb") as opened:
            return len(BYTE_ORDER_MARK) if opened.read(3) == BYTE_ORDER_MARK else 0

    @cached_property
    def end(self) -> int:
        return self.path.stat().st_size

    @property
    def has_text(self) -> bool:
        return any(piece.strip() for piece in self.pieces())

    def pieces(self) -> Iterator[str]:
        """Yields pieces of whole lines, where the text has lines; a text of less than 16 MB as one."""
        if self.end < IN_PIECES:
            yield self.span(self.start, self.end)
            return
        with self.path.open("rb") as opened:
            opened.seek(self.start)
            rest, at = b"", self.start
            while part := opened.read(PIECE):
                whole, line_end, rest = (rest + part).rpartition(b"\n")
                if whole or line_end:
                    yield self._decoded(whole + line_end, at)
                    at += len(whole) + 1
                elif len(rest) >= 64 * PIECE:
                    cut = _character(rest, len(rest) - 4)
                    yield self._decoded(rest[:cut], at)
                    rest, at = rest[cut:], at + cut
            if rest:
                yield self._decoded(rest, at)

    def span(self, start: int, stop: int) -> str:
        """Returns the characters that begin at these bytes."""
        with self.path.open("rb") as opened:
            opened.seek(start)
            return self._decoded(opened.read(stop - start), start)

    def character(self, place: int) -> int:
        """Returns the first byte, from this one on, at which a character begins."""
        if place >= self.end:
            return self.end
        with self.path.open("rb") as opened:
            opened.seek(place)
            return place + _character(opened.read(4), 0)

    def places(self) -> list[int]:
        """Returns where pieces begin, and the end."""
        inner = range(self.start + PIECE, self.end - PIECE // 2, PIECE)
        return [self.start, *map(self.character, inner), self.end]

    def _decoded(self, found: bytes, at: int) -> str:
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(error, str(self.path), self.field, self._lines_before(at) + 1) from None

    def _lines_before(self, place: int) -> int:
        lines = 0
        with self.path.open("rb") as opened:
            while place > 0 and (part := opened.read(min(PIECE, place))):
                lines, place = lines + part.count(b"\n"), place - len(part)
        return lines


def _character(found: bytes, place: int) -> int:
    """Returns the first place, from this one on, that does not continue a character; not beyond three bytes."""
    for further in range(4):
        if place + further >= len(found) or found[place + further] & 0xC0 != 0x80:
            return min(place + further, len(found))
    return place
