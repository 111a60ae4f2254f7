"""Reads tables: CSV, TSV, JSON, JSON Lines, parquet, hub data sets.

CSV and TSV are read by Python's own csv module in its strict mode. pandas is quicker, but cuts a text that holds an
unquoted comma and joins the lines between two stray quotes, both silently; here each is an error with its line.
"""

from __future__ import annotations

import difflib
import inspect
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drivetrain.data.csv_records import (
    Record,
    checked_records,
    lines_are_records,
    records,
    separated_otherwise,
    unquoted_records,
)
from drivetrain.data.encodings import not_utf8
from drivetrain.data.json_rows import read_json
from drivetrain.data.packed_files import ending, is_packed, read_bytes
from drivetrain.errors import Problem, UserError, clipped, counted, problem

if TYPE_CHECKING:
    import pandas as pd  # it takes half a second, which runs whose tables are read in blocks do without

NEAR = "did you mean"
MOST_OF_A_NAME = 40  # characters: a first row of data in the place of names is a text of any length

READERS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
LINES = ".txt"  # a text a line, to predict for


def read_table(
    path: str,
    field: str,
    header: bool = True,
    subset: str | None = None,
    split: str = "train",
    shorter: list[int] | None = None,
) -> pd.DataFrame:
    """Reads a table with its columns as they are named, or numbered from 0 without a header. Texts stay texts ("NA"
    too).

    path: a file, or a hub id if there is no such file. shorter: takes the lines of CSV rows with too few columns, which
    are left out then; without it they are an error. Raises UserError, on `field`, if it cannot be read or is empty.
    """
    file = Path(path)
    if not file.exists() and may_be_hub_id(path):
        from_the_hub: pd.DataFrame = load_from_hub(path, field, subset, split).to_pandas()
        return from_the_hub
    check_file(file, path, field)
    try:
        table = _read(file, field, header, shorter)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise not_utf8(error, path, field) from None
    except Exception as error:  # pandas and pyarrow raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise problem(field, f"{path} cannot be read: {reason}", "correct the file") from None
    if shorter and not len(table):
        raise all_cut_short(path, len(shorter), field)
    if not len(table):
        raise problem(field, f"{path} has a header but no rows", "give a file with rows")
    return table


def all_cut_short(path: str, rows: int, field: str) -> UserError:
    """Returns the error for a table of which each row has too few columns: its first line is the likelier fault."""
    which = f"all {rows:,} rows of {path} have" if rows > 1 else f"the only row of {path} has"
    return problem(field, f"{which} fewer columns than its first line", "correct the first line, or the rows")


def check_file(file: Path, path: str, field: str) -> None:
    """Raises UserError for a path that is no file, or none that can be a table."""
    if not file.is_file():
        why = f"{path} is a folder, not a file" if file.is_dir() else f"{path} does not exist"
        raise problem(field, why, f"paths are taken from the current folder, {Path.cwd()}")
    if ending(file) not in READERS:
        raise problem(field, f"{path} ends in {file.suffix or 'nothing'}", f"files may end in {', '.join(READERS)}")
    if not file.stat().st_size:
        raise problem(field, f"{path} is empty", "give a file with rows")
    with file.open("rb") as opened:
        kind = archive_kind(opened.read(8))
        if kind and ending(file) != ".parquet" and not is_packed(file):
            raise problem(field, f"{path} is {kind}, whatever it is called", "unpack it, and give a file in it")


def column(table: pd.DataFrame, name: str | int, path: str, field: str) -> pd.Series:
    """Returns one column, by name or position, of plain values. Raises UserError with the nearest name if it is
    missing."""
    place = place_of(list(table.columns), name, path, field)
    values = table.iloc[:, place]
    refuse_nested(values, name, path, field)
    return values


def refuse_nested(values: Iterable[Any], name: str | int, path: str, field: str) -> None:
    """Raises UserError for a column whose values are lists, objects or bytes."""
    nested = next((v for v in values if isinstance(v, list | dict | tuple | bytes | np.ndarray)), None)
    if nested is not None:
        raise problem(field, f"column {name!r} of {path} holds {type(nested).__name__}s", "give a column of texts")


def place_of(names: list[Any], name: str | int, path: str, field: str) -> int:
    """Returns the position of a column. Raises UserError with the nearest name if it is missing."""
    if isinstance(name, int):
        if 0 <= name < len(names):
            return name
        raise problem(
            field, f"{path} has {counted(len(names), 'column')}, so none at position {name}", "positions start at 0"
        )
    places = [place for place, known in enumerate(names) if known == name]
    if len(places) == 1:
        return places[0]
    if places:
        raise problem(field, f"{path} has {len(places)} columns {name!r}", "give the position of the one you mean")
    near = difflib.get_close_matches(name, [str(n) for n in names], n=1)
    known = ", ".join(clipped(str(n), MOST_OF_A_NAME) for n in names[:20])
    fix = f"{NEAR} {near[0]}? It has: {known}" if near else f"it has: {known}"
    fix = f"{hint} (it has: {known})" if (hint := separated_otherwise(names)) else fix
    raise problem(field, f"{path} has no column {name!r}", fix)


def with_header_hint(problems: Sequence[Problem], names: Sequence[Any]) -> list[Problem]:
    """Returns the problems of columns of which none was found; with the fix for a file whose first row is data, if no
    name is near.

    names: of the file's columns, its first row.
    """
    if any(NEAR in each.fix for each in problems):
        return list(problems)
    first = ", ".join(clipped(str(name), MOST_OF_A_NAME // 2) for name in names[:5])
    hint = f"; if its first row ({first}) is data, give header: false and the columns' positions from 0"
    return [replace(each, fix=each.fix + hint) for each in problems]


def _read(file: Path, field: str, header: bool, shorter: list[int] | None) -> pd.DataFrame:
    import pandas as pd

    if ending(file) == ".parquet":
        return pd.read_parquet(file)
    if ending(file) in (".jsonl", ".json"):
        return pd.DataFrame(read_json(file, str(file), field).rows)
    text = read_bytes(file).decode("utf-8-sig")
    if ending(file) == ".csv":
        return _table(records(io.StringIO(text, newline=""), ",", len(text)), ",", header, shorter)
    if lines_are_records(io.StringIO(text, newline=None)):
        return _table(unquoted_records(io.StringIO(text, newline=None)), "\t", header, shorter)
    return _table(records(io.StringIO(text, newline=""), "\t", len(text)), "\t", header, shorter)


def _table(found: Iterator[Record], separator: str, header: bool, shorter: list[int] | None) -> pd.DataFrame:
    """Returns the records as strings, all as wide as the first."""
    import pandas as pd

    first = next(found, None)
    if first is None:
        raise ValueError("it holds blank lines only")
    width = len(first[1])
    rows = []
    try:
        for line, fields in checked_records(found, width, separator, shorter is not None):
            if len(fields) == width:
                rows.append(fields)
            elif shorter is not None:
                shorter.append(line)
    except ValueError as error:
        hint = separated_otherwise(first[1])
        raise ValueError(f"{error}; {hint}" if hint else str(error)) from None
    return pd.DataFrame(rows if header else [first[1], *rows], columns=first[1] if header else range(width), dtype=str)


# --- others ----------------------------------------------------------------------------------------------------------


ARCHIVES = {
    b"PK\x03\x04": "a zip archive (an .xlsx workbook is one too)",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PAR1": "a parquet file",
}


def archive_kind(start: bytes) -> str | None:
    """Returns the kind of archive of a file that begins so, if it is one and no text."""
    return next((kind for mark, kind in ARCHIVES.items() if start.startswith(mark)), None)


def may_be_hub_id(path: str) -> bool:
    """Returns whether a path that does not exist can be the id of a data set on the hub."""
    given = Path(path)
    named = path.startswith((".", "/", "~")) or ending(given) in {*READERS, ".txt", ".zip"} or is_packed(given)
    return not named and len(given.parts) <= 2


def load_from_hub(name: str, field: str, subset: str | None, split: str, **options: Any) -> Any:
    """Returns one split, loaded by the package datasets. options: more of its `load_dataset`. Raises UserError if it is
    not available."""
    datasets = import_datasets(field, f"{name} is no file here, and ")
    try:
        _check_reachable(name, datasets)
        return datasets.load_dataset(name, subset, split=split, **without_code(datasets), **options)
    except Exception as error:  # network, missing data set, missing split: many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise problem(
            field,
            f"{name} is no file here and cannot be had from the hub: {reason}",
            "correct the path; or, without a network, download the data elsewhere and give the file",
        ) from error


def _check_reachable(name: str, datasets: Any) -> None:
    """Checks quickly whether the hub answers, since `load_dataset` tries for half a minute; cached data sets need no
    network."""
    from huggingface_hub import HfApi

    if not (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).exists():
        HfApi().dataset_info(name, timeout=10)


def without_code(datasets: Any) -> dict[str, bool]:
    """Returns arguments of load_dataset that refuse a data set's own code; newer versions run none, and have no such
    argument."""
    takes_it = "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters
    return {"trust_remote_code": False} if takes_it else {}


def import_datasets(field: str, because: str = "") -> Any:
    """Imports the optional package for hub data sets."""
    try:
        import datasets
    except ImportError:
        raise problem(
            field, f"{because}data sets named by hub id need the package datasets", "pip install drivetrain[hub]"
        ) from None
    return datasets
