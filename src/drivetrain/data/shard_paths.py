"""Expands names of shards: `train-{000..099}.tar`, `{a,b}.tar`, `*.tar`, a folder of them, or a single file."""

from __future__ import annotations

import glob
import itertools
import math
import re
from pathlib import Path

from drivetrain.errors import problem

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_SHOWN = 5
MOST_FILES = 1_000_000  # that braces stand for: a slip of the pen would fill the memory


def is_pattern(path: str) -> bool:
    """Returns whether it stands for several files, rather than being the path of one."""
    return not Path(path).expanduser().exists() and any(mark in path for mark in "{*?[")


def shard_files(path: str, field: str, endings: tuple[str, ...]) -> list[Path]:
    """Returns the files that `path` stands for, in order. Braces give their own order; files of a folder, and those of
    a pattern with *, ? or [...], are sorted.

    Raises UserError with all files of braces that are missing, and for a folder or pattern without a file.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        found = sorted(file for file in given.iterdir() if file.name.endswith(endings) and file.is_file())
        if not found:
            raise problem(field, f"the folder {path} holds no file that ends in {' or '.join(endings)}", "give another")
        return found
    if not is_pattern(path):
        if not given.is_file():
            raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
        return [given]
    names = names_of(str(given), field)
    files = [
        file for name in names for file in (_matching(name) if any(mark in name for mark in "*?[") else [Path(name)])
    ]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        shown = ", ".join(missing[:MOST_SHOWN]) + (" ..." if len(missing) > MOST_SHOWN else "")
        why = f"{len(missing)} of the {len(files)} files of {path} are not there: {shown}"
        raise problem(field, why, f"correct the pattern; paths are taken from the current folder, {Path.cwd()}")
    if not files:
        raise problem(field, f"no file fits {path}", f"paths are taken from the current folder, {Path.cwd()}")
    return files


def names_of(path: str, field: str) -> list[str]:
    """Returns the names that a path with braces stands for. Raises UserError if they are too many."""
    if (count := num_expanded(path)) > MOST_FILES:
        fix = f"correct the numbers in braces: {MOST_FILES:,} are the most"
        raise problem(field, f"{path} stands for {count:,} files", fix)
    return expanded(path)


def expanded(path: str) -> list[str]:
    """Expands braces that are not nested, as a shell does: {000..099} keeps the zeros, {a,b} is a list."""
    choices = []
    for number, part in enumerate(BRACES.split(path)):
        found = RANGE.fullmatch(part) if number % 2 else None
        if found is not None:
            start, stop, width = int(found[1]), int(found[2]), len(found[1])
            step = 1 if stop >= start else -1
            choices.append([f"{value:0{width}d}" for value in range(start, stop + step, step)])
        else:
            choices.append(part.split(",") if number % 2 else [part])
    return ["".join(each) for each in itertools.product(*choices)]


def num_expanded(path: str) -> int:
    """Returns the number of names that `expanded` returns, without making them."""
    counts = []
    for part in BRACES.findall(path):
        found = RANGE.fullmatch(part)
        counts.append(abs(int(found[2]) - int(found[1])) + 1 if found is not None else part.count(",") + 1)
    return math.prod(counts)


def _matching(pattern: str) -> list[Path]:
    """Returns the files that a pattern matches, sorted. As in a shell, a wildcard matches no hidden name."""
    return sorted(file for file in map(Path, glob.glob(pattern, recursive=True)) if file.is_file())
