"""Reads a table of file names and labels beside the images, the usual form in competitions: labels.csv and a folder."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from drivetrain.config.workload import ImageData
from drivetrain.data.tables import column, read_table
from drivetrain.errors import Problem, UserError, counted, problem, together

SHOWN = 5


@dataclass(frozen=True)
class ImageList:
    """N images. files: their paths; names: as in the table; labels: (N,) names of classes."""

    files: list[str]
    names: list[str]
    labels: np.ndarray


def listed_images(
    config: ImageData, path: str, field: str, suffixes: Container[str], labelled: bool = True
) -> ImageList:
    """Reads a table whose `image_column` names files of `image_folder` (by default the table's own folder), with or
    without their endings, and whose `label_column` names classes.

    labelled: whether labels are read; if not, each is "". Raises UserError with all problems of the columns at once,
    and for rows without a label and files that are missing.
    """
    table = read_table(path, field)
    given = {"image_column": config.image_column} | ({"label_column": config.label_column} if labelled else {})
    calls = [
        lambda key=key, name=name: column(table, name, path, f"workload.data.{key}") for key, name in given.items()
    ]
    names, *read = (_strings(values) for values in together(calls))
    labels = read[0] if labelled else [""] * len(names)
    folder = Path(config.image_folder).expanduser() if config.image_folder is not None else Path(path).parent
    if not folder.is_dir():
        raise problem("workload.data.image_folder", f"{folder} is no folder", "give the one that holds the images")
    files = _found(folder, names, suffixes)
    problems = []
    if unlabelled := [number for number, label in enumerate(labels, start=1) if labelled and not label.strip()]:
        have = "has" if len(unlabelled) == 1 else "have"
        why = f"{counted(len(unlabelled), 'row')} of {path} {have} no label: {_some(unlabelled)}"
        problems.append(Problem(field, why, "label or remove them"))
    if missing := [name for name, file in zip(names, files, strict=True) if file is None]:
        why = f"{len(missing)} of {len(names)} images that {path} names are not in {folder}: {_some(missing)}"
        problems.append(Problem(field, why, "give workload.data.image_folder, or correct the names"))
    if twice := _contradictions(files, labels, names):
        why = f"{path} gives {len(twice)} images two labels: {_some(twice)}"
        problems.append(Problem(field, why, "leave one label to each"))
    if problems:
        raise UserError(problems)
    return ImageList([str(file) for file in files], names, np.array(labels))


def _found(folder: Path, names: list[str], suffixes: Container[str]) -> list[str | None]:
    """Returns the file of each name; None if there is none, or several that differ only in their endings."""
    by_stem: dict[str, list[str]] | None = None
    found: list[str | None] = []
    for name in names:
        file = os.path.join(folder, name)
        if os.path.isfile(file) and name:
            found.append(file)
            continue
        if by_stem is None:  # asked for only where a name is no file
            by_stem = _by_stem(folder, suffixes)
        candidates = by_stem.get(os.path.normpath(name), []) if name else []
        found.append(candidates[0] if len(candidates) == 1 else None)
    return found


def _contradictions(files: list[str | None], labels: list[str], names: list[str]) -> list[str]:
    """Returns the names of images that another row gives another label."""
    known: dict[str, str] = {}
    rows = zip(files, labels, names, strict=True)
    return [name for file, label, name in rows if file is not None and known.setdefault(file, label) != label]


def _by_stem(folder: Path, suffixes: Container[str]) -> dict[str, list[str]]:
    """Returns path below the folder, without its ending → the image files that have it."""
    found: dict[str, list[str]] = defaultdict(list)
    for top, _, files in os.walk(folder):
        for file in files:
            stem, suffix = os.path.splitext(os.path.relpath(os.path.join(top, file), folder))
            if suffix.lower() in suffixes:
                found[stem].append(os.path.join(top, file))
    return found


def _strings(values: pd.Series) -> list[str]:
    return ["" if pd.isna(value) else str(value) for value in values.astype(object)]


def _some(found: list[int] | list[str]) -> str:
    return ", ".join(map(str, found[:SHOWN])) + (" ..." if len(found) > SHOWN else "")
