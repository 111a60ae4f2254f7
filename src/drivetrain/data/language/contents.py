"""Collects all texts of data sets, from which a tokenizer may be made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.data.language.sets import DataSet
from drivetrain.data.language.stored_rows import StoredItems
from drivetrain.data.long_text import LongText


class Contents:
    """All texts of some data sets, which can be iterated several times."""

    def __init__(self, sets: Sequence[DataSet]) -> None:
        self._sets = sets

    def __iter__(self) -> Iterator[str | LongText]:
        return (content for each in self._sets for content in contents_of(each))

    @property
    def are_large(self) -> bool:
        """Returns whether some are on disk."""
        return any(
            isinstance(each.conversations, StoredItems)
            or isinstance(each.texts, StoredItems)
            or any(isinstance(text.content, LongText) for text in each.texts)
            for each in self._sets
        )

    def identities(self, root: Path) -> list[Any]:
        """Returns what identifies these texts: names of stores, digests of files, and the texts in memory.

        root: where digests of files are kept.
        """
        known: list[Any] = []
        for each in self._sets:
            stored = [items.identity for items in (each.texts, each.conversations) if isinstance(items, StoredItems)]
            known += stored
            if not stored:
                known += [one.source.digest(root) if isinstance(one, LongText) else one for one in contents_of(each)]
        return known


def contents_of(dataset: DataSet) -> Iterator[str | LongText]:
    """Yields all texts of a data set, from which a tokenizer may be made."""
    yield from (text.content for text in dataset.texts)
    for conversation in dataset.conversations:
        for message in conversation.messages:
            yield from filter(None, (message.content, message.reasoning_content, message.name))
            yield from (json.dumps(call, ensure_ascii=False) for call in message.tool_calls)
        yield from (json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
