"""Tables as people keep them: CSV, TSV, JSON, JSON Lines, parquet, hub data sets."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from drivetrain.errors import problem

READERS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def read_table(
    path: str, field: str, header: bool = True, subset: str | None = None, split: str = "train"
) -> pd.DataFrame:
    """A table with its columns as they are named, or numbered from 0 without a header. Texts stay texts ("NA" too).

    path: a file, or a hub id where there is no such file. UserError, on `field`, for what cannot be read or is empty.
    """
    file = Path(path)
    if not file.exists() and not file.suffix:
        return _from_hub(path, field, subset, split)
    if not file.is_file():
        why = f"{path} is a folder, not a file" if file.is_dir() else f"{path} does not exist"
        raise problem(field, why, f"paths are taken from the current folder, {Path.cwd()}")
    if file.suffix.lower() not in READERS:
        raise problem(field, f"{path} ends in {file.suffix or 'nothing'}", f"files may end in {', '.join(READERS)}")
    if not file.stat().st_size:
        raise problem(field, f"{path} is empty", "give a file with rows")
    try:
        table = _read(file, header)
    except UnicodeDecodeError as error:
        raise problem(
            field,
            f"{path} is not UTF-8 (byte {error.object[error.start] if error.start < len(error.object) else '?'} at "
            f"{error.start})",
            f"convert it, e.g. iconv -f {_guess_encoding(file)} -t UTF-8",
        ) from None
    except Exception as error:  # pandas and pyarrow raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise problem(field, f"{path} cannot be read: {reason}", "correct the file") from None
    if not len(table):
        raise problem(field, f"{path} has a header but no rows", "give a file with rows")
    return table


def column(table: pd.DataFrame, name: str | int, path: str, field: str) -> pd.Series:
    """One column, by name or position. UserError with the nearest name if it is not there."""
    names = list(table.columns)
    if isinstance(name, int):
        if 0 <= name < len(names):
            return table.iloc[:, name]
        raise problem(field, f"{path} has {len(names)} columns, so none at position {name}", "positions start at 0")
    if name in names:
        return table[name]
    near = difflib.get_close_matches(name, [str(n) for n in names], n=1)
    known = ", ".join(str(n) for n in names[:20])
    fix = f"did you mean {near[0]}? It has: {known}" if near else f"it has: {known}"
    raise problem(field, f"{path} has no column {name!r}", fix)


def _read(file: Path, header: bool) -> pd.DataFrame:
    match file.suffix.lower():
        case ".csv" | ".tsv":
            separator = "\t" if file.suffix.lower() == ".tsv" else ","
            return pd.read_csv(
                file,
                sep=separator,
                header=0 if header else None,
                dtype=str,
                keep_default_na=False,
                encoding="utf-8-sig",
                index_col=False,
                on_bad_lines="error",
            )
        case ".jsonl":
            return pd.DataFrame(list(_json_lines(file)))
        case ".json":
            rows = json.loads(file.read_text(encoding="utf-8-sig"))
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError("it holds no list of objects")
            return pd.DataFrame(rows)
    return pd.read_parquet(file)


def _json_lines(file: Path) -> Any:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is broken JSON: {error.msg}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} holds no object")
                yield row


def _guess_encoding(file: Path) -> str:
    data = file.read_bytes()[:100_000]
    for encoding in ("utf-16", "gb18030", "big5", "cp1252"):
        try:
            data.decode(encoding)
        except UnicodeDecodeError as error:
            if error.start < len(data) - 4:
                continue
        return encoding.upper()
    return "ITS-ENCODING"


def _from_hub(name: str, field: str, subset: str | None, split: str) -> pd.DataFrame:
    datasets = import_datasets(field)
    try:
        table: pd.DataFrame = datasets.load_dataset(name, subset, split=split).to_pandas()
    except Exception as error:  # network, missing data set, missing split: many kinds
        raise problem(
            field,
            f"{name} is no file here and cannot be had from the hub: {str(error).splitlines()[0][:200]}",
            "without a network: download the data elsewhere and give the file",
        ) from error
    return table


def import_datasets(field: str) -> Any:
    """The optional package for hub data sets."""
    try:
        import datasets
    except ImportError:
        raise problem(
            field, "data sets named by hub id need the package datasets", "pip install drivetrain[hub]"
        ) from None
    return datasets
