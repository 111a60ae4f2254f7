"""Writes the run file of `drivetrain init`, and the files it needs beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.location import store_address
from drivetrain.data.remote_sources import fetch
from drivetrain.errors import Problem, UserError, problem
from drivetrain.init.catalogue import FOLDER, recipe
from drivetrain.init.data_kinds import kind_of
from drivetrain.init.fit import fitted
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.notices import notify

USUAL = "digits"  # whose data come with scikit-learn


@dataclass(frozen=True)
class Written:
    files: Sequence[Path]
    decisions: Sequence[str]
    has_data: bool  # whether what it names is there to be looked at


def written(
    name: str | None,
    data: Path | None,
    to: Path,
    text_column: str | None = None,
    label_column: str | None = None,
    overwrite: bool = False,
) -> Written:
    """Writes a recipe, fitted to the data if there are any. Raises UserError for data of unknown kind, and for existing
    files."""
    if to.suffix not in (".yaml", ".yml"):
        raise problem("--output", f"{to} does not end in .yaml", "give a name such as run.yaml")
    if data is None:
        files, decisions = _as_it_is(name or USUAL, to)
        has_data = name in (None, "digits", "digits-small-lr")
    else:
        address = store_address(data)
        copy = data if address is None else fetch(address, "--data", notify)
        made = fitted(kind_of(copy, text_column, label_column), name, str(to.with_suffix("")))
        files = {to: made.text, **{to.with_name(f"{to.stem}{end}"): text for end, text in made.beside.items()}}
        decisions, has_data = made.decisions, True
        if address is not None:  # the run file keeps it, so that it starts on another machine as it is
            files = {file: text.replace(str(copy), address) for file, text in files.items()}
            decisions = [line.replace(str(copy), address) for line in decisions]
    _refuse_existing([] if overwrite else list(files))
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise problem("--output", f"{file} cannot be written: {error.strerror}", "give another") from None
    return Written(list(files), decisions, has_data)


def _as_it_is(name: str, to: Path) -> tuple[dict[Path, str], list[str]]:
    """Copies the recipe's file unchanged, and the Python file that it names beside it."""
    file = recipe(name)
    text = file.read_text(encoding="utf-8")
    files = {to: text}
    for script in re.findall(r"path: examples/(\w+\.py)", text):
        beside = to.with_name(script)
        files = {to: text.replace(f"examples/{script}", str(beside))}
        files[beside] = (FOLDER / script).read_text(encoding="utf-8")
    return files, [f"The recipe {file.stem} unchanged; its first lines name the data it needs."]


def _refuse_existing(files: Sequence[Path]) -> None:
    there = [file for file in files if file.exists()]
    if there:
        fix = "give another --output, or --overwrite"
        raise UserError([Problem("--output", f"{file} is there already", fix) for file in there])
