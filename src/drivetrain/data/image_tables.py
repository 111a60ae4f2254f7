"""Reads tables with a column of encoded images: parquet files in the layout of the hub, and hub data sets
themselves."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from drivetrain.config.workload import ImageData
from drivetrain.data.array_store import default_root
from drivetrain.data.image_rows import stored_images
from drivetrain.data.lazy_texts import RowNames
from drivetrain.data.shard_paths import is_pattern, shard_files
from drivetrain.data.tables import import_datasets, without_code
from drivetrain.errors import Problem, UserError, problem

LEAST_STORED = 1 << 24  # bytes
SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val", "dev", "eval", "evaluation")}


@dataclass(frozen=True)
class ImageTable:
    """N encoded images. open: returns an image's bytes; labels: (N,) names of classes, None if they were not requested;
    key: identifies the images, if anything does."""

    open: Callable[[int], io.BytesIO]
    names: Sequence[str]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    key: str | None = None
    notes: tuple[str, ...] = ()


def parquet_images(path: Path | str, field: str, config: ImageData, split: str, labelled: bool = True) -> ImageTable:
    """Reads a parquet file, a pattern of names, or a folder; from a folder with names such as train-00000.parquet, the
    split's.

    The images of files of 16 MB and more in all are mapped from the cache, smaller ones held in memory.
    """
    files = shard_files(str(path), field, (".parquet",)) if is_pattern(str(path)) else _files(Path(path), field, split)
    columns = {"image_column": config.image_column} | ({"label_column": config.label_column} if labelled else {})
    try:
        schemas = [pyarrow.parquet.read_schema(file) for file in files]
        _check_columns(schemas[0].names, columns, str(files[0]))
        for file, schema in zip(files, schemas, strict=True):
            if not set(columns.values()) <= set(schema.names):
                raise problem(field, f"{file} lacks columns that {files[0]} has", "give files of one layout")
        classes = _declared_classes(schemas[0], config.label_column)
        if sum(file.stat().st_size for file in files) >= LEAST_STORED:
            return _stored(files, classes, str(path), field, config, labelled)
        table = _read(files, list(columns.values()))
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise problem(field, f"{path} cannot be read: {reason}", "give whole parquet files of one layout") from None
    return _image_table(table, classes, str(path), field, config, labelled)


def _read(files: Sequence[Path], columns: list[str]) -> pyarrow.Table:
    tables = [pyarrow.parquet.read_table(file, columns=columns) for file in files]
    return pyarrow.concat_tables(tables, promote_options="permissive")


def _stored(
    files: Sequence[Path],
    classes: tuple[str, ...] | None,
    path: str,
    field: str,
    config: ImageData,
    has_labels: bool,
) -> ImageTable:
    labels = None
    if has_labels:
        table = _read(files, [config.label_column])
        labels = _labels(table[config.label_column], classes, path, field)

    def encoded(column: pyarrow.ChunkedArray, before: int) -> pyarrow.ChunkedArray:
        return _encoded(column, path, config.image_column, before)

    images, key, warning = stored_images(files, config.image_column, encoded, config.cache or default_root(), field)
    if not len(images):
        raise problem(field, f"{path} has no rows", "give data with rows")
    names = RowNames(range(1, len(images) + 1))
    return ImageTable(images.open, names, labels, classes, key, () if warning is None else (warning,))


def hub_images(name: str, field: str, config: ImageData, split: str) -> ImageTable:
    """Reads a data set by its hub id. The evaluation part is its test split, or else its validation split."""
    datasets = import_datasets(field)
    try:
        held = datasets.load_dataset(name, **without_code(datasets))
    except Exception as error:  # network, missing data set, broken data set: many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise problem(
            field,
            f"{name} cannot be had from the hub: {reason}",
            "without a network: download its parquet files elsewhere and give their folder with source: parquet",
        ) from error
    found = next((known for known in SPLITS[split] if known in held), None)
    if found is None:
        raise problem(field, f"{name} has no {split} split, but {', '.join(held)}", "give another data set")
    part = held[found]
    _check_columns(part.column_names, {"image_column": config.image_column, "label_column": config.label_column}, name)
    feature = part.features[config.label_column]
    classes = tuple(feature.names) if hasattr(feature, "names") else None
    table = part.cast_column(config.image_column, datasets.Image(decode=False)).with_format("arrow")[:]
    return _image_table(table, classes, name, field, config, labelled=True)


# --- parts -----------------------------------------------------------------------------------------------------------


def _files(path: Path, field: str, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    files = sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))
    if not files:
        raise problem(field, f"{path} holds no parquet files", "their names end in .parquet")
    for known in SPLITS[split]:
        of_split = [file for file in files if file.stem == known or file.stem.startswith(f"{known}-")]
        if of_split:
            return of_split
    named = [file for file in files if file.stem.split("-")[0] in {*SPLITS["train"], *SPLITS["test"]}]
    if named:  # other splits only: taking them all would mix training with evaluation
        raise problem(field, f"{path} has no {split} split, but {named[0].name}", "give the files of the split")
    return files


def _check_columns(names: Sequence[str], wanted: Mapping[str, str], path: str) -> None:
    problems = []
    for key, name in wanted.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            known = f"it has: {', '.join(names)}"
            fix = f"did you mean {near[0]}? {known}" if near else known
            problems.append(Problem(f"workload.data.{key}", f"{path} has no column {name!r}", fix))
    if problems:
        raise UserError(problems)


def _declared_classes(schema: pyarrow.Schema, label_column: str) -> tuple[str, ...] | None:
    """Returns the names of integer classes that the `datasets` library writes into the file."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    if metadata is None:
        return None
    feature = json.loads(metadata).get("info", {}).get("features", {}).get(label_column)
    return tuple(feature["names"]) if isinstance(feature, dict) and feature.get("names") else None


def _image_table(
    table: pyarrow.Table,
    classes: tuple[str, ...] | None,
    path: str,
    field: str,
    config: ImageData,
    labelled: bool,
) -> ImageTable:
    if not len(table):
        raise problem(field, f"{path} has no rows", "give data with rows")
    images = _encoded(table[config.image_column], path, config.image_column)
    labels = _labels(table[config.label_column], classes, path, field) if labelled else None
    return ImageTable(
        lambda index: io.BytesIO(images[index].as_py()), RowNames(range(1, len(table) + 1)), labels, classes
    )


def _encoded(column: pyarrow.ChunkedArray, path: str, name: str, before: int = 0) -> pyarrow.ChunkedArray:
    """Returns bytes of image files: the column itself, or its field `bytes` as in the hub's layout. before: rows before
    it."""
    types = pyarrow.types
    if types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pyarrow.compute.struct_field(column, "bytes")
    if not (types.is_binary(column.type) or types.is_large_binary(column.type)):
        raise problem(
            "workload.data.image_column", f"{path}: {name} holds {column.type}, no image bytes", "name the images"
        )
    if column.null_count:
        rows = _shown(np.flatnonzero(column.is_null().to_numpy()) + 1 + before)
        raise problem("workload.data.image_column", f"{path}: no image bytes in rows {rows}", "embed or remove them")
    return column


def _labels(column: pyarrow.ChunkedArray, classes: Sequence[str] | None, path: str, field: str) -> np.ndarray:
    """Returns names of classes: from integers (named by `classes`, if any), booleans or strings."""
    types, name = pyarrow.types, "workload.data.label_column"
    if column.null_count:
        rows = _shown(np.flatnonzero(column.is_null().to_numpy()) + 1)
        raise problem(field, f"{path}: no label in rows {rows}", "label or remove them")
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return np.array(column.to_pylist())
    if not (types.is_integer(column.type) or types.is_boolean(column.type)):
        raise problem(name, f"{path}: labels are {column.type}", "labels are integers or strings")
    numbers: Any = column.to_numpy().astype(np.int64)
    top = len(classes) - 1 if classes is not None else None
    outside = (numbers < 0) | (numbers > top if top is not None else False)
    if outside.any():
        found = ", ".join(map(str, np.unique(numbers[outside])[:5]))
        why = f"{path}: labels {found} in rows {_shown(np.flatnonzero(outside) + 1)}"
        limits = f"labels run from 0 to {top}" if top is not None else "labels start at 0"
        raise problem(field, why, f"{limits}; some data sets come without labels for their test part (-1)")
    return np.array(classes)[numbers] if classes is not None else numbers.astype(str)


def _shown(rows: np.ndarray) -> str:
    return ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
