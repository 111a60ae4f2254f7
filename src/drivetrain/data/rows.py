"""Rows of a data set in their own order, from any kind of source: files, folders of files, the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np

from drivetrain.config.language_data import Documents
from drivetrain.data.arrow_rows import read_arrow, read_parquet
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.encodings import not_utf8
from drivetrain.data.json_files import JSON_LINES
from drivetrain.data.json_rows import BrokenRows, HeldRows, StreamedJsonLines, read_json
from drivetrain.data.long_text import LONG, LongText
from drivetrain.data.packed_files import OPENERS, PackedError, ending, is_packed, text_bytes
from drivetrain.data.row_blocks import ARROW, ENDINGS, TABLES, TEXTS, RowFile
from drivetrain.data.tables import may_be_hub_id, read_table
from drivetrain.errors import Problem, UserError, problem

LARGE = 16 << 20  # bytes from which a data set's rows are read in blocks and kept on disk
Row = dict[str, Any]


class Rows(Protocol):
    """One data set's rows, in a fixed order."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row]:
        """Returns rows start to stop - 1, or fewer at the end. Keys that a row lacks are absent; null is None."""
        ...

    def where(self, index: int) -> str:
        """Returns file and place of a row, for errors: "chat.jsonl line 12"."""
        ...


def open_rows(
    path: str,
    field: str,
    *,
    subset: str | None = None,
    split: str = "train",
    folder: str | None = None,
    stream: bool = False,
    documents: Documents = "file",
) -> Rows:
    """Opens the rows of `path`: a file, a folder (all readable files below it, sorted, as one data set), a pattern of
    files, or a hub id.

    subset, split and folder (`data_dir`) choose a part of a hub data set. A text file is one row {"text": ...}, or one
    a document; in a folder, hidden files and a data set's own README.md, dataset_info.json and the like are left out.

    stream: keep in memory only the rows in use: JSON Lines, parquet, Arrow, texts and hub data sets. CSV and JSON are
    read whole. Same rows in the same order; faults inside a file are found when their rows are read, not here.

    Raises UserError on `field`, with the file and the line or row, for all files at once; BrokenRows if some rows are
    good.
    """
    if not is_there(path):
        refuse_absent(path, field)
        from drivetrain.data.hub_rows import open_hub

        return open_hub(path, field, subset, split, folder, stream)
    refuse_hub_choices(path, field, subset=subset, split=split, folder=folder)
    files = data_files(path, field, ENDINGS)
    parts: list[Rows] = []
    problems: list[Problem] = []
    for name, file in files.items():
        try:
            parts.append(open_file(file, name, field, stream, documents))
        except PackedError as error:
            problems.append(Problem(field, str(error), "copy or download it again"))
        except UserError as error:
            problems.extend(error.problems)
            parts += [error.rows] if isinstance(error, BrokenRows) and len(error.rows) else []
        except OSError as error:
            problems.append(Problem(field, f"{file} cannot be read: {error.strerror}", "allow reading it"))
    if len(problems) > 5:
        more = Problem(field, f"and {len(problems) - 5} more files cannot be read", "correct or remove them too")
        problems = [*problems[:5], more]
    rows = parts[0] if len(parts) == 1 else JoinedRows(parts)
    if problems:
        raise BrokenRows(problems, rows) if len(rows) else UserError(problems)
    if not rows:
        raise problem(field, f"{path} has no rows", "give data with rows")
    return rows


def refuse_absent(path: str, field: str) -> None:
    """Raises UserError for a path that is not there, and can be no data set of the hub."""
    if not is_there(path) and (ending(Path(path)) in ENDINGS or not may_be_hub_id(path)):
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")


def large_files(path: str, field: str, documents: Documents = "file") -> list[RowFile]:
    """Returns the files of a data set of 16 MB and more, to be read in blocks; none of a smaller one.

    None either if it has a text file of that size which is one document: that is tokenised in pieces.
    """
    try:
        files = data_files(path, field, ENDINGS)
        sizes = {name: text_bytes(file) for name, file in files.items()}
    except (UserError, OSError):  # opening them says why
        return []
    if sum(sizes.values()) < LARGE or any(
        ending(file) not in ENDINGS or not sizes[name] for name, file in files.items()
    ):
        return []
    whole = [name for name, file in files.items() if ending(file) in TEXTS and documents == "file"]
    if any(sizes[name] >= LARGE and not is_packed(files[name]) for name in whole):
        return []
    return [RowFile(file, name, field, documents) for name, file in files.items()]


class HubPart(TypedDict):
    """The part of a hub data set that is read."""

    subset: str | None
    split: str
    folder: str | None


def refuse_hub_choices(path: str, field: str, **chosen: Unpack[HubPart]) -> None:
    """Raises UserError if choices for a hub data set are set for files of this machine."""
    usual = {"subset": None, "split": "train", "folder": None}
    given = [f"{name} {value}" for name, value in chosen.items() if value != usual[name]]
    if given:
        why = f"{path} is here as {'a folder' if Path(path).expanduser().is_dir() else 'a file'}, without any"
        raise problem(field, f"{why} {' or '.join(given)}: those are of hub data sets", "give the path of that part")


def open_file(file: Path, name: str, field: str, stream: bool, documents: Documents = "file") -> Rows:
    """Opens the rows of one file, as described in `open_rows`."""
    kind = ending(file)
    if kind not in ENDINGS:
        fix = f"files may end in {', '.join(ENDINGS)}, compressed also {', '.join(OPENERS)}"
        raise problem(field, f"{file} ends in {file.suffix.lower() or 'nothing'}", fix)
    if is_packed(file) and kind in ARROW:
        raise problem(field, f"{file} is compressed as a whole", "unpack it: these files are compressed within")
    if not file.stat().st_size:
        raise problem(field, f"{file} is empty", "give a file with rows")
    if kind in JSON_LINES and stream and not is_packed(file):
        return StreamedJsonLines(file, name, field)
    if kind == ".json" or kind in JSON_LINES:
        return read_json(file, name, field)
    if kind in TABLES:
        return _read_csv(file, name, field)
    if kind in TEXTS:
        return _open_text(file, name, field, stream, documents)
    return (read_parquet if kind == ".parquet" else read_arrow)(file, name, field, stream)


def _open_text(file: Path, name: str, field: str, stream: bool, documents: Documents) -> Rows:
    if documents != "file" or is_packed(file):
        opened = RowFile(file, name, field, documents)
        blocks = list(opened.blocks())
        numbers = [number for block in blocks for number in block.numbers]
        return HeldRows(name, [row for block in blocks for row in block.rows], opened.unit, numbers)
    text = TextFile(file, name, field, whole=stream)
    if not stream:
        text.read(0, 1)  # what is wrong with it is found with the other files' faults
    return text


def _read_csv(file: Path, name: str, field: str) -> HeldRows:
    table = read_table(str(file), field)
    columns = [str(column) for column in table.columns]
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise problem(field, f"{file} has two columns {twice[0]!r}", "name each column differently in the first line")
    return HeldRows(name, [dict(zip(columns, row, strict=True)) for row in table.itertuples(index=False, name=None)])


@dataclass(frozen=True)
class TextFile:
    """A whole file as one row, which is read when its text is used. whole: the file is never held as a whole."""

    path: Path
    name: str
    field: str
    whole: bool = False

    def __len__(self) -> int:
        return 1

    def read(self, start: int, stop: int) -> list[Row]:
        if start > 0 or stop < 1:
            return []
        if not self.whole and self.path.stat().st_size >= LONG:
            return [{"text": LongText(self.path, self.field)}]
        try:
            return [{"text": self.path.read_bytes().decode("utf-8-sig")}]
        except UnicodeDecodeError as error:
            raise not_utf8(error, str(self.path), self.field) from None

    def where(self, index: int) -> str:
        del index
        return self.name


class JoinedRows:
    """Several files' rows, one file after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(len(part) for part in self._parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __bool__(self) -> bool:
        """Returns whether there are rows, without the lengths."""
        return any(self._parts)

    def read(self, start: int, stop: int) -> list[Row]:
        rows: list[Row] = []
        if start == 0 and "_starts" not in self.__dict__:  # the beginning, without the lengths of all parts
            for part in self._parts:
                rows += part.read(0, stop - len(rows)) if len(rows) < stop else []
            return rows
        for number in range(self._part(start), len(self._parts)):
            first = int(self._starts[number])
            if first >= stop:
                break
            rows += self._parts[number].read(max(start - first, 0), stop - first)
        return rows

    def where(self, index: int) -> str:
        number = self._part(index)
        return self._parts[number].where(index - int(self._starts[number]))

    def _part(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1
