"""The file of predictions: a row a sample, JSON Lines or CSV."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import followed

ENDINGS = (".jsonl", ".csv")


def check_place(path: Path, run: RunConfig, data: str | None) -> None:
    """Raises UserError if the file's name has no known ending, or predictions would replace anything but earlier
    ones."""
    if path.suffix not in ENDINGS:
        raise problem("--output", f"{path} does not end in .jsonl or .csv", "give one of these, or leave it out")
    given = [*texts(run.model_dump(mode="json")), *([] if data is None else [data])]
    if path.exists() and followed(path) in set(map(followed, given)):
        raise problem("--output", f"{path} is a file that the run is made from", "give another")
    if path.exists() and not _holds_predictions(path):
        raise problem("--output", f"{path} is there, and holds something else than predictions", "give another")


def _holds_predictions(path: Path) -> bool:
    """Returns whether a file is empty or holds predictions. A row begins with the sample's name."""
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        return not first or first.startswith("sample," if path.suffix == ".csv" else '{"sample":')
    except (OSError, ValueError):
        return False


def write_predictions(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """Writes JSON Lines or, if the name ends in .csv, CSV. Written aside and renamed; returns the number of rows."""
    path = followed(path)  # a link stays
    aside = path.with_name(f".{path.name}.partial-{os.getpid()}")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8", newline="") as file:
            write = _csv_writer(file) if path.suffix == ".csv" else _json_writer(file)
            for row in rows:
                write(row)
                count += 1
        aside.replace(path)
    except OSError as error:
        raise problem("--output", f"{path} cannot be written: {error.strerror}", "give another file") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)  # still there only if something failed
    return count


def _json_writer(file: Any) -> Any:
    return lambda row: file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _csv_writer(file: Any) -> Any:
    import csv

    writers: list[csv.DictWriter[str]] = []

    def write(row: dict[str, Any]) -> None:
        flat = _flat(row)
        if not writers:
            writers.append(csv.DictWriter(file, list(flat), restval=""))
            writers[0].writeheader()
        if new := [name for name in flat if name not in writers[0].fieldnames]:
            why = f"the row of {row.get('sample')} has {', '.join(new)}, which the first row has not"
            raise problem("--output", f"{why}: a CSV has the same columns in each", "give a .jsonl file")
        writers[0].writerow(flat)

    return write


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Makes a column for each value: {"probabilities": {"cat": 0.9}} becomes {"probabilities.cat": 0.9}. Raises
    UserError for two values that would have one column."""
    pairs: list[tuple[str, Any]] = []
    for name, value in row.items():
        nested = isinstance(value, dict)
        pairs += [(f"{name}.{key}", each) for key, each in value.items()] if nested else [(name, value)]
    flat = dict(pairs)
    if len(flat) < len(pairs):
        raise problem("--output", f"two values of the row of {row.get('sample')} have one name", "give a .jsonl file")
    return flat
