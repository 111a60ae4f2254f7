"""Rows of a data set as they stand in it, whatever holds them: files, folders of files, the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drivetrain.data.arrow_rows import read_arrow, read_parquet
from drivetrain.data.json_rows import BrokenRows, HeldRows, StreamedJsonLines, read_json, read_json_lines
from drivetrain.data.long_text import LONG, LongText
from drivetrain.data.tables import may_be_hub_id, not_utf8, read_table
from drivetrain.errors import Problem, UserError, problem

Row = dict[str, Any]

JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
TEXTS = (".txt", ".md")
ARROW = (".parquet", ".arrow", ".feather")
ENDINGS = (".json", *JSON_LINES, *TABLES, *ARROW, *TEXTS)

# what the hub and the package datasets put beside the data
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
BESIDE_DATA = {"readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


class Rows(Protocol):
    """One data set's rows, in a fixed order."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row]:
        """Rows start to stop - 1, or fewer at the end. Keys that a row lacks are absent; null is None."""
        ...

    def where(self, index: int) -> str:
        """File and place of a row, for errors: "chat.jsonl line 12"."""
        ...


def open_rows(
    path: str,
    field: str,
    *,
    subset: str | None = None,
    split: str = "train",
    folder: str | None = None,
    stream: bool = False,
) -> Rows:
    """path: a file, a folder (all readable files below it, sorted, as one data set) or, if there is neither, a hub id.

    subset, split and folder (`data_dir`) choose a part of a hub data set. A text file is one row {"text": ...}; in a
    folder, hidden files and a data set's own README.md, dataset_info.json and the like are left out.

    stream: keep in memory only what is asked for: JSON Lines, parquet, Arrow, texts and hub data sets. CSV and JSON are
    read whole. Same rows in the same order; faults inside a file are found when their rows are read, not here.

    UserError on `field`, with the file and the line or row, of all files at once; BrokenRows where rows are left.
    """
    given = Path(path).expanduser()
    if not given.exists():
        if given.suffix.lower() in ENDINGS or not may_be_hub_id(path):
            raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
        from drivetrain.data.hub_rows import open_hub

        return open_hub(path, field, subset, split, folder, stream)
    _refuse_hub_choices(path, field, subset=subset, split=None if split == "train" else split, folder=folder)
    files = files_below(given, path, field) if given.is_dir() else {given.name: given}
    parts: list[Rows] = []
    problems: list[Problem] = []
    for name, file in files.items():
        try:
            parts.append(open_file(file, name, field, stream))
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


def large_files(path: str, field: str) -> list[Path]:
    """The files of a data set of 16 MB and more, if each is of a kind whose rows can be read as they are asked for."""
    given = Path(path).expanduser()
    try:
        files = list(files_below(given, path, field).values()) if given.is_dir() else [given]
        large = sum(file.stat().st_size for file in files) >= LONG
    except (UserError, OSError):  # opening them says why
        return []
    return files if large and all(file.suffix.lower() in (*JSON_LINES, *ARROW) for file in files) else []


def _refuse_hub_choices(path: str, field: str, **chosen: str | None) -> None:
    given = [f"{name} {value}" for name, value in chosen.items() if value is not None]
    if given:
        why = f"{path} is here as {'a folder' if Path(path).expanduser().is_dir() else 'a file'}, without any"
        raise problem(field, f"{why} {' or '.join(given)}: those are of hub data sets", "give the path of that part")


def files_below(folder: Path, path: str, field: str, compressed: bool = False) -> dict[str, Path]:
    """Name from the folder on → file. compressed: whether files that are compressed can be read."""
    if (folder / "dataset_dict.json").is_file():  # `save_to_disk` of several splits
        splits = sorted(each.name for each in folder.iterdir() if each.is_dir())
        raise problem(field, f"{path} holds several splits", f"give the folder of one: {', '.join(splits)}")
    if (folder / "state.json").is_file():  # `save_to_disk` of one: beside its files may lie what `map` cached
        return {name: folder / name for name in _saved_files(folder / "state.json", field)}
    below = {file.relative_to(folder): file for file in sorted(folder.rglob("*"))}
    seen = {
        place.as_posix(): file
        for place, file in below.items()
        if file.name.lower() not in BESIDE_DATA and not any(part.startswith(".") for part in place.parts)
    }
    packed = {name for name, file in seen.items() if compressed and file.is_file() and _is_packed(file)}
    _refuse_what_would_be_passed_over({name: file for name, file in seen.items() if name not in packed}, path, field)
    files = {
        name: file
        for name, file in seen.items()
        if name in packed or (file.suffix.lower() in ENDINGS and file.is_file())
    }
    if not files:
        raise problem(
            field, f"the folder {path} has no file that can be read", f"files may end in {', '.join(ENDINGS)}"
        )
    return files


def _is_packed(file: Path) -> bool:
    """Whether its rows are lines that are compressed in a way which is read (data/streams)."""
    return file.suffix.lower() in COMPRESSED[:-1] and Path(file.stem).suffix.lower() in (*JSON_LINES, *TEXTS)


def _saved_files(state: Path, field: str) -> list[str]:
    try:
        return [each["filename"] for each in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        why = f"{state} does not name the files of the saved data set ({type(error).__name__})"
        raise problem(field, why, "save the data set again, or give the path of one file") from None


def _refuse_what_would_be_passed_over(seen: Mapping[str, Path], path: str, field: str) -> None:
    """Data that look like part of the folder and would not be read."""
    passed = []
    for name, file in seen.items():
        ending = file.suffix.lower()
        if file.is_symlink() and not file.exists() and ending in ENDINGS:
            passed.append(f"{name} (a link that leads nowhere)")
        elif file.is_symlink() and file.is_dir():
            passed.append(f"{name} (a link to a folder)")
        elif ending in COMPRESSED and Path(file.stem).suffix.lower() in ENDINGS:
            passed.append(f"{name} (compressed)")
    if passed:
        more = f" and {len(passed) - 5} more" if len(passed) > 5 else ""
        why = f"the folder {path} has {', '.join(passed[:5])}{more}, which cannot be read"
        raise problem(
            field, why, "unpack compressed files, give folders that are linked to by themselves, or remove them"
        )


def open_file(file: Path, name: str, field: str, stream: bool) -> Rows:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise problem(field, f"{file} ends in {ending or 'nothing'}", f"files may end in {', '.join(ENDINGS)}")
    if not file.stat().st_size:
        raise problem(field, f"{file} is empty", "give a file with rows")
    if ending == ".json":
        return read_json(file, name, field)
    if ending in JSON_LINES:
        return StreamedJsonLines(file, name, field) if stream else read_json_lines(file, name, field)
    if ending in TABLES:
        return _read_csv(file, name, field)
    if ending in TEXTS:
        text = TextFile(file, name, field, whole=stream)
        if not stream:
            text.read(0, 1)  # what is wrong with it is found with the other files' faults
        return text
    return (read_parquet if ending == ".parquet" else read_arrow)(file, name, field, stream)


def _read_csv(file: Path, name: str, field: str) -> HeldRows:
    table = read_table(str(file), field)
    columns = [str(column) for column in table.columns]
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise problem(field, f"{file} has two columns {twice[0]!r}", "name each column differently in the first line")
    return HeldRows(name, [dict(zip(columns, row, strict=True)) for row in table.itertuples(index=False, name=None)])


@dataclass(frozen=True)
class TextFile:
    """A whole file as one row, read when asked for: a large one only when its text is. whole: not then either."""

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
        """Found without the lengths."""
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
