"""Folders of pictures, and tables that name them, as `drivetrain init` finds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.errors import problem
from drivetrain.init.data_kinds import ClassFolders, Documents, Kind, kind_of

TRAIN = ("train", "training")
EVALUATION = ("test", "validation", "val", "valid", "dev", "eval", "evaluation")
LOOKED_AT = 50  # pictures whose size is read
MOST_FILES = 200_000  # counted
TEXTS = (".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".parquet")


def in_folder(root: Path) -> Kind:
    """Finds class folders, perhaps in train/ and test/; a table beside its pictures; or a folder of texts."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."}
    train = next((folders[name] for name in TRAIN if name in folders), root)
    evaluation = next((folders[name] for name in EVALUATION if name in folders), None) if train is not root else None
    classes = [path for path in sorted(train.iterdir()) if path.is_dir() and any(_pictures(path))]
    if len(classes) > 1:
        found = [picture for path in classes for picture in islice(_pictures(path), 1 + LOOKED_AT // len(classes))]
        count = sum(1 for _ in islice((p for path in classes for p in _pictures(path)), MOST_FILES))
        names = tuple(path.name for path in classes)
        return ClassFolders(str(train), None if evaluation is None else str(evaluation), names, count, sides_of(found))
    files = [path for path in sorted(root.iterdir()) if path.is_file() and path.suffix.lower() in TEXTS]
    if any(_pictures(root)):
        table = next((path for path in files if path.suffix.lower() in (".csv", ".tsv", ".jsonl")), None)
        if table is not None:
            return kind_of(table)
        why = f"{root} holds pictures, but neither a folder for each class nor a table with their labels"
        raise problem(
            "--data", why, "sort them into a folder a class, or put a labels.csv (filename,label) beside them"
        )
    if not files:
        raise problem("--data", f"{root} holds no pictures, texts or tables", "give another folder, or a file")
    first = kind_of(files[0])
    if not isinstance(first, Documents):
        why = f"{root} holds {len(files)} tables: {', '.join(path.name for path in files[:5])}"
        raise problem("--data", why, "give one of them")
    total = sum(path.stat().st_size for path in files)
    return Documents(str(root), first.sample, total)


def _pictures(folder: Path) -> Iterable[Path]:
    from drivetrain.data.images import image_suffixes

    suffixes = image_suffixes()
    return (path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())


def sides_of(pictures: Iterable[Path]) -> Sequence[tuple[int, int]]:
    """Returns (width, height) of the pictures that can be read."""
    from drivetrain.data.images import file_pictures

    names = [str(path) for path in pictures]
    opened, found = file_pictures(names, names), []
    for number in range(len(names)):
        with suppress(Exception):  # training names what cannot be read
            height, width = opened.dimensions(number)
            found.append((width, height))
    return found


def column_of_files(beside: Path, columns: Sequence[str], rows: Sequence[Any]) -> tuple[str | None, Path | None]:
    """Returns the column that names picture files, and the folder of these files."""
    from drivetrain.data.images import image_suffixes

    suffixes = image_suffixes()
    for name in columns:
        values = [str(row[name]) for row in rows[:LOOKED_AT]]
        if values and all(Path(value).suffix.lower() in suffixes for value in values):
            places = [beside, *(path for path in sorted(beside.iterdir()) if path.is_dir())]
            folder = next((place for place in places if (place / values[0]).is_file()), beside)
            return name, folder
    return None, beside


def encoded_column(rows: Sequence[Any]) -> str | None:
    """Returns the column of a parquet file that holds whole picture files."""
    for name, value in (rows[0] if rows else {}).items():
        if isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes)):
            return str(name)
    return None
