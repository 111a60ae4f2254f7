"""A table's texts and labels as arrays on disk: read in blocks once, mapped by every later reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, stored
from drivetrain.data.cell_texts import as_texts, is_missing, kinds_of, style_of
from drivetrain.data.encodings import refusal_of
from drivetrain.data.lazy_texts import row_name
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.data.packed_files import ending, text_bytes
from drivetrain.data.source_files import SourceFile
from drivetrain.data.table_blocks import Block, Table, open_table
from drivetrain.data.tables import all_cut_short, place_of, refuse_nested, with_header_hint
from drivetrain.errors import Problem, UserError, problem
from drivetrain.runtime.progress_line import ProgressLine

FORMAT = 4
WHYS = ("it has no text", "it has no label", "it has too few columns")  # by the numbers that a store keeps


def place_of_row(row: int, line: int, files: Sequence[tuple[str, int]], path: str) -> str:
    """Returns file, line and row of a row that is counted over all files: "line 122 (row 121) of a.csv".

    line: of its file; 0 if that has none. files: name of each, and how many rows end with it.
    """
    if len(files) < 2:
        return f"{row_name(row, line)} of {path}"
    before = 0
    for name, end in files:
        if row <= end:
            return f"{row_name(row - before, line)} of {name}"
        before = end
    raise IndexError(row)


@dataclass(frozen=True)
class TextRows:
    """A finished store's texts. labels: numbers into `label_names`, which are sorted; bad, bad_lines, bad_whys: rows
    that cannot be used, the line of each (0: none), and its reason among WHYS."""

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
    files: Sequence[Path], path: str, field: str, header: bool, columns: dict[str, str | int], root: Path
) -> tuple[TextRows, str | None]:
    """Reads `files`, shards of one table that each have the columns; path: their common name. columns: text_column,
    text_pair_column, label_column → name or position, for those that are wanted.

    Raises UserError for files that cannot be read, with all problems of the columns at once. Returns a warning too if
    the cache cannot be used.
    """
    try:
        sources = [SourceFile(file, field) for file in files]
        described = repr((FORMAT, [(ending(file), file.name) for file in files], header, columns))
        digests = " ".join(source.digest(root) for source in sources)
        key = blake2b(f"{digests} {described}".encode(), digest_size=20).hexdigest()

        def build(folder: Path) -> None:
            _build(folder, sources, path, field, header, columns)

        store, warning = stored(root, f"rows-{key}", build)
    except UserError:
        raise
    except OSError as error:
        raise problem(field, f"{path} cannot be read: {error.strerror or error}", "allow reading it") from None
    return TextRows(store), warning


def _build(
    folder: Path, sources: Sequence[SourceFile], path: str, field: str, header: bool, columns: dict[str, str | int]
) -> None:
    check_room(folder, 2 * sum(text_bytes(source.file) for source in sources), f"reading {path}")
    styles = dict.fromkeys(columns, "plain")
    while not (attempt := _Pass(folder, sources, path, field, header, columns, styles)).write():
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
        self,
        folder: Path,
        sources: Sequence[SourceFile],
        path: str,
        field: str,
        header: bool,
        columns: dict[str, Any],
        styles: dict[str, str],
    ) -> None:
        self._folder, self._sources, self._path, self._field = folder, sources, path, field
        self._header, self._columns, self._styles = header, columns, styles
        self._kinds: dict[str, set[str]] = {role: set() for role in columns}
        self._labels: dict[tuple[type, Any], int] = {}
        self._short = 0  # rows with too few columns

    @property
    def wanted_styles(self) -> dict[str, str]:
        return {role: style_of(kinds) for role, kinds in self._kinds.items()}

    def write(self) -> bool:
        """Returns whether the store is finished; it is not if numbers among the texts have another style than
        assumed."""
        rows, kept, ends = 0, 0, []
        sizes = [text_bytes(source.file) for source in self._sources]
        shown = ProgressLine(f"reading {self._path}", sum(sizes))
        with Writer(self._folder) as writer:
            for source, size in zip(self._sources, sizes, strict=True):
                left = size  # other columns, quotes and compression make the texts fewer or more bytes than the file
                for block in self._blocks(source.file):
                    count, written = self._add(writer, block, rows)
                    kept += count
                    rows += len(block.columns[0])
                    shown.add(min(written, left))
                    left -= min(written, left)
                shown.add(left)
                ends.append(rows)
            shown.end()
            self._check(rows, kept)
            wanted = self.wanted_styles
            if any(wanted[role] != self._styles[role] for role in wanted if role != "label_column"):
                return False
            values = [value for _, value in self._labels]
            names = as_texts(values, wanted["label_column"]) if values else []
            for source in self._sources:
                source.check_unchanged()  # before the store is finished, which no later start would doubt
            files = [[source.file.name, end] for source, end in zip(self._sources, ends, strict=True)]
            writer.finish({"labels": names, "rows": rows, "files": files})
        return True

    def _blocks(self, file: Path) -> Iterator[Block]:
        path = self._path if len(self._sources) == 1 else str(file)
        try:
            table = open_table(file, self._field, self._header, list(self._columns.values()), shorter=True)
            places = _places(table, self._columns, path, self._header)
            yield from table.blocks(places)
        except Exception as error:  # pyarrow raises many kinds
            raise refusal_of(file, error, path, self._field) from None

    def _add(self, writer: Writer, block: Block, before: int) -> tuple[int, int]:
        """Writes a block's rows. Returns how many of them can be used, and the bytes of their texts. before: rows of
        earlier blocks."""
        self._short += len(block.short)
        columns = dict(zip(self._columns, block.columns, strict=True))
        for role, values in columns.items():
            self._kinds[role] |= kinds_of(values)
            refuse_nested(values, self._columns[role], self._path, f"workload.data.{role}")
        first = as_texts(columns["text_column"], self._styles["text_column"])
        whys = _whys(first, columns.get("label_column"), block.short)
        kept = [number for number in range(len(first)) if number not in whys]
        bad = np.array(list(whys), np.int64)
        writer.append("bad", bad + before + 1)
        writer.append("bad_lines", np.array(block.lines, np.int64)[bad] if block.lines else 0 * bad)
        writer.append("bad_whys", np.array(list(whys.values()), np.int8))
        writer.append("rows", np.array(kept, np.int64) + before + 1)
        digests, written = [blake2b(digest_size=8) for _ in kept], 0
        for name, role in (("first", "text_column"), ("second", "text_pair_column")):
            if role not in columns:
                continue
            texts = first if name == "first" else as_texts(columns[role], self._styles[role])
            encoded = [texts[number].encode("utf-8", "surrogatepass") for number in kept]
            writer.append(name, np.frombuffer(b"".join(encoded), np.uint8))
            writer.append_ends(f"{name}_ends", [len(each) for each in encoded])
            written += sum(map(len, encoded))
            for digest, each in zip(digests, encoded, strict=True):
                digest.update(len(each).to_bytes(8, "little") + each)
        hashes = b"".join(digest.digest() for digest in digests)
        writer.append("hashes", np.frombuffer(hashes, np.uint64))
        if "label_column" in columns:
            writer.append("labels", self._numbers(columns["label_column"], kept))
        return len(kept), written

    def _numbers(self, labels: list[Any], kept: Iterable[int]) -> np.ndarray:
        values = ((type(labels[place]), labels[place]) for place in kept)
        return np.array([self._labels.setdefault(value, len(self._labels)) for value in values], np.int32)

    def _check(self, rows: int, kept: int) -> None:
        field, path = self._field, self._path
        if not rows:
            raise problem(field, f"{path} has a header but no rows", "give a file with rows")
        if self._short == rows:
            raise all_cut_short(path, rows, field)
        if not kept:
            raise nothing_usable(path, field, "label_column" in self._columns)


def _whys(texts: Sequence[str], labels: Sequence[Any] | None, short: Iterable[int]) -> dict[int, int]:
    """Returns places of rows that cannot be used, in their order, and the reason of each among WHYS."""
    found = {place: 2 for place in short}
    for place, text in enumerate(texts):
        if not text.strip():
            found.setdefault(place, 0)
        elif labels is not None and (is_missing(labels[place]) or not str(labels[place]).strip()):
            found.setdefault(place, 1)
    return dict(sorted(found.items()))


def nothing_usable(path: str, field: str, labelled: bool) -> UserError:
    """Returns the error for a table of which no row can be used."""
    if labelled:
        return problem(field, f"no row of {path} has both a text and a label", "check text_column and label_column")
    return problem(field, f"no row of {path} has a text", "check text_column")
