"""Checks of the files that a workload's block names. No file is opened."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.location import store_address
from drivetrain.errors import Problem


@dataclass(frozen=True)
class MissingPath(Problem):
    """A file or folder of the run file that this machine does not have; another one may."""

    path: Path


def looks_like_hub_id(path: str) -> bool:
    """`name` or `owner/name` without a file ending; a local path of that form wins where it exists."""
    given = Path(path)
    if store_address(path) is not None:
        return False
    return not given.exists() and not given.is_absolute() and len(given.parts) == 2 and "." not in given.name


def missing(field: str, path: Path) -> Iterator[Problem]:
    """Yields a problem where nothing is at `path`; a path with wildcards stands for the files that it matches. An
    address in a store is looked up when it is fetched."""
    if store_address(path) is not None:
        return
    if glob.has_magic(str(path)) and not path.exists():
        if not glob.glob(str(path), recursive=True):
            fix = f"patterns are taken from the current folder, {Path.cwd()}"
            yield MissingPath(field, f"{path} matches no file", fix, path)
    elif not path.exists():
        fix = f"paths are taken from the current folder, {Path.cwd()}"
        yield MissingPath(field, f"{path} does not exist", fix, path)


def missing_data(train: str | None, evaluation: str | None, marks: str = "") -> Iterator[Problem]:
    """Yields the problems of workload.data.train and .evaluation. Hub ids are not looked up, and neither is a path with
    one of the characters `marks`."""
    for field, path in (("train", train), ("evaluation", evaluation)):
        if path is None or looks_like_hub_id(path) or any(mark in path for mark in marks):
            continue
        yield from missing(f"workload.data.{field}", Path(path))
