"""The file of predictions: a row a sample, JSON Lines or CSV."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.errors import problem

ENDINGS = (".jsonl", ".csv")


def check_place(path: Path, run: RunConfig, data: str | None) -> None:
    """UserError if the name says no form, or predictions would replace what they are made from."""
    if path.suffix not in ENDINGS:
        raise problem("--output", f"{path} does not end in .jsonl or .csv", "give one of these, or leave it out")
    given = [*_texts(run.model_dump(mode="json")), *([] if data is None else [data])]
    if path.exists() and path.resolve() in {Path(each).resolve() for each in given}:
        raise problem("--output", f"{path} is a file that the run is made from", "give another")


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(inner)


def write_predictions(rows: Iterator[dict[str, Any]], path: Path) -> int:
    """JSON Lines or, where the name ends in .csv, CSV. Written aside and renamed; returns the number of rows."""
    aside = path.with_name(f".{path.name}.partial")
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

    writer = csv.writer(file)
    header_done: list[bool] = []

    def write(row: dict[str, Any]) -> None:
        if not header_done:
            writer.writerow(row)
            header_done.append(True)
        writer.writerow(row.values())

    return write
