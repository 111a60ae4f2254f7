"""Items made of the rows of a large data set (conversations, documents), kept as arrays on disk.

The rows are read and checked once; an item is decoded when it is used.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, stored
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.data.packed_files import text_bytes
from drivetrain.data.row_blocks import RowFile
from drivetrain.data.source_files import SourceFile
from drivetrain.errors import Problem, UserError
from drivetrain.runtime.progress_line import ProgressLine

T = TypeVar("T")
FORMAT = 8
MOST_SHOWN = 5  # files that cannot be read


class StoredItems(Sequence[T], ABC):
    """The items of a finished store, or those that `indices` names."""

    def __init__(self, store: Store, indices: np.ndarray | None = None) -> None:
        self.store, self._indices = store, indices

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self._indices)  # another process maps the arrays itself

    @staticmethod
    @abstractmethod
    def encoded(item: Any) -> str:
        """Returns an item's content as one text."""

    @staticmethod
    @abstractmethod
    def decoded(content: str, where: str) -> Any:
        """Returns the item of that content. where: the file and row that it comes from."""

    def __len__(self) -> int:
        return len(self._contents)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            both = zip(self._contents[index], self.places[index], strict=True)
            return [self.decoded(content, where) for content, where in both]
        return cast(T, self.decoded(self._contents[index], self.places[index]))

    @cached_property
    def places(self) -> MappedTexts:
        """Returns the file and row that each item comes from."""
        return self._texts("places")

    @cached_property
    def _contents(self) -> MappedTexts:
        return self._texts("contents")

    def _texts(self, name: str) -> MappedTexts:
        return MappedTexts(self.store.array(name), self.store.array(f"{name}_ends"), self._indices)

    def taken(self, indices: np.ndarray) -> StoredItems[T]:
        return type(self)(self.store, indices if self._indices is None else self._indices[indices])

    @property
    def sizes(self) -> np.ndarray:
        """Returns the bytes of each, (N,) int64."""
        sizes = np.diff(self.store.array("contents_ends"), prepend=0)
        return sizes if self._indices is None else sizes[self._indices]

    @property
    def identity(self) -> list[str | None]:
        """Returns what identifies these items: the store's name, and a digest of the indices."""
        chosen = self._indices
        return [
            self.store.folder.name,
            None if chosen is None else blake2b(chosen.astype(np.int64).tobytes(), digest_size=20).hexdigest(),
        ]


def taken(items: Sequence[T], indices: np.ndarray) -> Sequence[T]:
    """Returns the items of the indices, in their order."""
    return items.taken(indices) if isinstance(items, StoredItems) else [items[index] for index in indices]


def row_starts(items: Sequence[Any]) -> np.ndarray:
    """Returns the first item of each row, and the number of all, (rows + 1,): items of a row follow each other."""
    places = items.places if isinstance(items, StoredItems) else [each.where for each in items]
    first = [number for number, (before, own) in enumerate(pairwise(places), start=1) if before != own]
    return np.array([0, *first, len(places)] if len(places) else [0], dtype=np.int64)


def of_rows(starts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the items of those rows, in their order. starts: as `row_starts` returns them."""
    return np.concatenate([np.arange(0), *(np.arange(starts[row], starts[row + 1]) for row in numbers)])


@dataclass(frozen=True)
class StoredRead(Generic[T]):
    """The result of reading. rows: how many the data set has; problems: the unusable ones; warning: if the cache is not
    used."""

    items: StoredItems[T]
    rows: int
    problems: list[BadRow]
    warning: str | None


@dataclass(frozen=True)
class Reading(Generic[T]):
    """The way rows of files become items. read: row and its place → its items; raises RowError for an unusable
    row.

    described: everything that decides the items beside the files. facts: counts that the store keeps of a block's
    items. check_keys: raises UserError for the keys that all rows have together.
    """

    files: Sequence[RowFile]
    read: Callable[[Mapping[str, Any], str], Sequence[T]]
    described: str
    facts: Callable[[Sequence[T]], Mapping[str, int]] = lambda _: {}
    check_keys: Callable[[list[str]], object] = lambda _: None


def stored_rows(kind: type[StoredItems[T]], name: str, reading: Reading[T], root: Path) -> StoredRead[T]:
    """Returns the items of all rows, on disk below `root`, in a folder whose name begins with `name`.

    Raises UserError for lines that cannot be read, and for files that change meanwhile.
    """
    sources = [SourceFile(each.path, each.field) for each in reading.files]
    held = [
        (file.name, file.unit, repr(file.documents), source.digest(root))
        for file, source in zip(reading.files, sources, strict=True)
    ]
    described = json.dumps([FORMAT, reading.described, held])
    key = f"{name}-{blake2b(described.encode(), digest_size=20).hexdigest()}"
    store, warning = stored(root, key, lambda folder: _build(folder, kind, reading, sources))
    bad = [BadRow(where, why) for where, why in store.facts["bad"]]
    return StoredRead(kind(store), store.facts["rows"], bad, warning)


def _build(folder: Path, kind: type[StoredItems[T]], reading: Reading[T], sources: Sequence[SourceFile]) -> None:
    sizes = [text_bytes(file.path) for file in reading.files]
    check_room(folder, sum(sizes), "reading the rows")
    keys: dict[str, None] = {}
    bad: list[tuple[str, str]] = []
    unreadable: list[Problem] = []
    counted: dict[str, int] = {}
    count = 0
    shown = ProgressLine(f"reading {', '.join(file.name for file in reading.files[:3])}", sum(sizes))
    with Writer(folder) as writer:
        _append(writer, [], [])
        for file, size in zip(reading.files, sizes, strict=True):
            faults: list[str] = []
            read = 0
            try:
                for block in file.blocks():
                    items: list[T] = []
                    places: list[str] = []
                    for row, number in zip(block.rows, block.numbers, strict=True):
                        keys.update(dict.fromkeys(row))
                        where = file.where(number)
                        try:
                            made = reading.read(row, where)
                            items += made
                            places += [where] * len(made)
                        except RowError as error:
                            bad.append((where, str(error)))
                    count += len(block.rows)
                    faults += block.faults
                    for name, found in reading.facts(items).items():
                        counted[name] = counted.get(name, 0) + found
                    _append(writer, map(kind.encoded, items), places)
                    part = min(block.bytes, size - read)
                    read += part
                    shown.add(part)
            except UserError as error:  # what is wrong with other files is reported too
                unreadable += error.problems
            unreadable += [file.broken(faults)] if faults else []
            shown.add(size - read)
        shown.end()
        if unreadable:
            raise UserError(_first_problems(unreadable, unreadable[0].field))
        reading.check_keys(list(keys))
        for source in sources:
            source.check_unchanged()  # before the store is finished, which no later start would doubt
        writer.finish({"rows": count, "bad": bad, "counted": counted})


def _first_problems(unreadable: Sequence[Problem], field: str) -> list[Problem]:
    more = len(unreadable) - MOST_SHOWN
    shown = list(unreadable[:MOST_SHOWN])
    if more > 0:
        shown.append(Problem(field, f"and {more} more files cannot be read", "correct or remove them too"))
    return shown


def _append(writer: Writer, contents: Iterable[str], places: Iterable[str]) -> None:
    for name, texts in (("contents", contents), ("places", places)):
        held = [text.encode("utf-8", "surrogatepass") for text in texts]
        writer.append(name, np.frombuffer(b"".join(held), np.uint8))
        writer.append_ends(f"{name}_ends", [len(text) for text in held])
