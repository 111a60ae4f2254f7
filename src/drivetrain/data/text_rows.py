"""A table's texts and labels as arrays on disk: read in blocks once, mapped by everyone after that."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, stored
from drivetrain.data.source_files import SourceFile
from drivetrain.data.table_blocks import Table, open_table, refusal_of
from drivetrain.data.tables import place_of, refuse_nested, with_header_hint
from drivetrain.errors import Problem, UserError, problem

FORMAT = 1
SAID_FROM = 50_000_000  # bytes that take a second or more


class MappedTexts(Sequence[str]):
    """UTF-8 texts that lie end to end in a file; `indices`: which of them these are."""

    def __init__(self, content: np.ndarray, ends: np.ndarray, indices: np.ndarray | None = None) -> None:
        self._content, self._ends, self._indices = content, ends, indices

    def __len__(self) -> int:
        return len(self._ends if self._indices is None else self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        place = range(len(self))[index] if self._indices is None else int(self._indices[index])
        start = int(self._ends[place - 1]) if place else 0
        return self._content[start : int(self._ends[place])].tobytes().decode("utf-8", "surrogatepass")

    def taken(self, indices: np.ndarray) -> MappedTexts:
        return MappedTexts(self._content, self._ends, indices if self._indices is None else self._indices[indices])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class TextRows:
    """A finished store's texts. labels: numbers into `label_names`, which are sorted; bad: numbers of rows without."""

    store: Store

    @property
    def first(self) -> MappedTexts:
        return MappedTexts(self.store.array("first"), self.store.array("first_ends"))

    @property
    def second(self) -> MappedTexts | None:
        if "second" not in self.store:
            return None
        return MappedTexts(self.store.array("second"), self.store.array("second_ends"))

    @property
    def label_names(self) -> list[str]:
        return sorted(set(self.store.facts["labels"]))

    @property
    def labels(self) -> np.ndarray:
        names = self.label_names
        numbers = np.searchsorted(np.array(names, dtype=object), np.array(self.store.facts["labels"], dtype=object))
        return numbers.astype(np.int32)[self.store.array("labels")]


def open_text_rows(
    file: Path, path: str, field: str, header: bool, columns: dict[str, str | int], root: Path
) -> tuple[TextRows, str | None]:
    """columns: text_column, text_pair_column, label_column → name or position, of those that are wanted.

    UserError for what cannot be read, with all problems of the columns at once. Returns a warning too if the cache
    cannot be used.
    """
    try:
        source = SourceFile(file, field)
        described = repr((FORMAT, file.suffix.lower(), header, columns))
        key = blake2b(f"{source.digest(root)} {described}".encode(), digest_size=20).hexdigest()

        def build(folder: Path) -> None:
            _build(folder, source, path, field, header, columns)

        store, warning = stored(root, f"rows-{key}", build)
    except UserError:
        raise
    except OSError as error:
        raise problem(field, f"{path} cannot be read: {error.strerror or error}", "allow reading it") from None
    return TextRows(store), warning


def _build(
    folder: Path, source: SourceFile, path: str, field: str, header: bool, columns: dict[str, str | int]
) -> None:
    file = source.file
    check_room(folder, 2 * file.stat().st_size, f"reading {path}")
    if (size := file.stat().st_size) >= SAID_FROM:
        print(f"reading {path} ({size / 1e6:,.0f} MB), which the next start need not", file=sys.stderr, flush=True)
    try:
        table = open_table(file, header, list(columns.values()))
    except Exception as error:  # pyarrow raises many kinds
        raise refusal_of(file, error, path, field) from None
    places = _places(table, columns, path, header)
    styles = dict.fromkeys(columns, "plain")
    while not (attempt := _Pass(folder, source, path, field, columns, styles)).write(table, places):
        styles = attempt.wanted_styles  # a column of numbers: how they are written depends on all of them


def _places(table: Table, columns: dict[str, str | int], path: str, header: bool) -> list[int]:
    places: list[int] = []
    problems: list[Problem] = []
    for role, name in columns.items():
        try:
            places.append(place_of(table.names, name, path, f"workload.data.{role}"))
        except UserError as error:
            problems.extend(error.problems)
    if problems and not places and header:
        problems = with_header_hint(problems, table.names)
    if problems:
        raise UserError(problems)
    return places


class _Pass:
    """One reading of a table into a store."""

    def __init__(
        self, folder: Path, source: SourceFile, path: str, field: str, columns: dict[str, Any], styles: dict[str, str]
    ) -> None:
        self._folder, self._source, self._path, self._field = folder, source, path, field
        self._columns, self._styles = columns, styles
        self._kinds: dict[str, set[str]] = {role: set() for role in columns}
        self._labels: dict[tuple[type, Any], int] = {}
        self._unlabelled: list[int] = []
        self._num_unlabelled = 0

    @property
    def wanted_styles(self) -> dict[str, str]:
        return {role: _style(kinds) for role, kinds in self._kinds.items()}

    def write(self, table: Table, places: Sequence[int]) -> bool:
        """Whether the store is finished; it is not where numbers among the texts have another style than was given."""
        rows, kept = 0, 0
        with Writer(self._folder) as writer:
            for block in self._blocks(table, places):
                columns = dict(zip(self._columns, block, strict=True))
                kept += self._add(writer, columns, rows)
                rows += len(block[0])
            self._check(rows, kept)
            wanted = self.wanted_styles
            if any(wanted[role] != self._styles[role] for role in wanted if role != "label_column"):
                return False
            values = [value for _, value in self._labels]
            names = _as_texts(values, wanted["label_column"]) if values else []
            self._source.check_unchanged()  # before the store is finished, which no later start would doubt
            writer.finish({"labels": names, "rows": rows})
        return True

    def _blocks(self, table: Table, places: Sequence[int]) -> Iterator[list[list[Any]]]:
        try:
            yield from table.blocks(places)
        except Exception as error:  # pyarrow raises many kinds
            raise refusal_of(self._source.file, error, self._path, self._field) from None

    def _add(self, writer: Writer, columns: dict[str, list[Any]], before: int) -> int:
        for role, values in columns.items():
            self._kinds[role] |= _kinds(values)
            refuse_nested(values, self._columns[role], self._path, f"workload.data.{role}")
        first = _as_texts(columns["text_column"], self._styles["text_column"])
        kept = [number for number, text in enumerate(first) if text.strip()]
        bad = [before + number + 1 for number, text in enumerate(first) if not text.strip()]
        writer.append("bad", np.array(bad, np.int64))
        writer.append("rows", np.array(kept, np.int64) + before + 1)
        digests = [blake2b(digest_size=8) for _ in kept]
        for name, role in (("first", "text_column"), ("second", "text_pair_column")):
            if role not in columns:
                continue
            texts = first if name == "first" else _as_texts(columns[role], self._styles[role])
            encoded = [texts[number].encode("utf-8", "surrogatepass") for number in kept]
            writer.append(name, np.frombuffer(b"".join(encoded), np.uint8))
            writer.append_ends(f"{name}_ends", [len(each) for each in encoded])
            for digest, each in zip(digests, encoded, strict=True):
                digest.update(len(each).to_bytes(8, "little") + each)
        hashes = b"".join(digest.digest() for digest in digests)
        writer.append("hashes", np.frombuffer(hashes, np.uint64))
        if "label_column" in columns:
            writer.append("labels", self._numbers(columns["label_column"], kept, before))
        return len(kept)

    def _numbers(self, labels: list[Any], kept: Iterable[int], before: int) -> np.ndarray:
        numbers = []
        for place in kept:
            value = None if _is_missing(labels[place]) else labels[place]
            number = self._labels.setdefault((type(value), value), len(self._labels))
            numbers.append(number)
            if value is None or not str(value).strip():
                self._num_unlabelled += 1
                if len(self._unlabelled) < 5:
                    self._unlabelled.append(before + place + 1)
        return np.array(numbers, np.int32)

    def _check(self, rows: int, kept: int) -> None:
        field, path = self._field, self._path
        if not rows:
            raise problem(field, f"{path} has a header but no rows", "give a file with rows")
        if not kept:
            raise problem(field, f"no row of {path} has a text", "check text_column")
        if count := self._num_unlabelled:
            shown = ", ".join(map(str, self._unlabelled)) + (" ..." if count > 5 else "")
            raise problem(field, f"{count} rows of {path} have no label: {shown}", "label or remove them")


# --- values as texts -------------------------------------------------------------------------------------------------


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in _MISSING


_MISSING = ("NaTType", "NAType")  # pandas' own


def _kinds(values: Sequence[Any]) -> set[str]:
    """Of a block's values: text, int, whole or broken floats, missing."""
    types = set(map(type, values))
    if types == {str}:
        return {"text"}
    found = {"missing"} if any(map(_is_missing, values)) else set()
    for each in types:
        if each is float:
            numbers = [value for value in values if type(value) is float and not _is_missing(value)]
            broken = any(not value.is_integer() for value in numbers)
            found |= {"float", "broken"} if broken else {"float"} if numbers else set()
        elif each is int:
            found.add("int")
        elif each is not type(None) and each.__name__ not in _MISSING:
            found.add("text")
    return found


def _style(kinds: set[str]) -> str:
    """How numbers are written: whole ones without a point, unless others of their column have digits behind it."""
    if "text" in kinds or "float" not in kinds:
        return "plain"
    return "float" if "broken" in kinds else "whole"


def _as_texts(values: Sequence[Any], style: str) -> list[str]:
    if style == "plain":
        return [value if type(value) is str else "" if _is_missing(value) else str(value) for value in values]
    return ["" if _is_missing(value) else _number(float(value), style) for value in values]


def _number(value: float, style: str) -> str:
    return str(int(value)) if style == "whole" and math.isfinite(value) else str(value)
