"""Documents, the texts of pre-training: in memory, or those of large data sets on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.data.language.stored_rows import Reading, StoredItems, StoredRead, stored_rows
from drivetrain.data.long_text import LongText
from drivetrain.data.row_blocks import RowFile


@dataclass(frozen=True)
class Text:
    """A document. where: file and row."""

    content: str | LongText
    where: str


class StoredTexts(StoredItems[Text]):
    """Documents, decoded without change."""

    @staticmethod
    def encoded(item: Text) -> str:
        assert isinstance(item.content, str)
        return item.content

    @staticmethod
    def decoded(content: str, where: str) -> Text:
        return Text(content, where)

    def contents(self, start: int, stop: int) -> list[str]:
        return self._contents[start:stop]


def stored_texts(
    files: Sequence[RowFile], column: str, read: Callable[[Mapping[str, Any], str], Text], root: Path
) -> StoredRead[Text]:
    """Stores the documents of all rows on disk below `root`. read: row and its place → its text."""
    reading = Reading(files, lambda row, where: [read(row, where)], column)
    return stored_rows(StoredTexts, "documents", reading, root)
