"""Documents, the texts of pre-training: in memory, or those of large data sets on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.data.language.stored_rows import Reading, StoredItems, StoredRead, stored_rows
from drivetrain.data.long_text import LongText
from drivetrain.data.rows import Rows


@dataclass(frozen=True)
class Text:
    """A document. where: file and row."""

    content: str | LongText
    where: str


class StoredTexts(StoredItems[Text]):
    """Documents, each as it is."""

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
    rows: Rows,
    files: Sequence[Path],
    column: str,
    read: Callable[[Mapping[str, Any], int], Text],
    field: str,
    root: Path,
) -> StoredRead[Text]:
    """The documents of all rows, on disk below `root`. files: what the rows are read from; read: row → its text."""
    return stored_rows(StoredTexts, "documents", Reading(rows, files, field, read, column), root)
