"""Imports configurations of other software that a user uploads, as `drivetrain import` does."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.board import run_file
from drivetrain.board.access import User
from drivetrain.board.board import Board
from drivetrain.board.foreign import FIX
from drivetrain.board.places import texts_of
from drivetrain.board.runs import NAME
from drivetrain.errors import Problem, UserError, problem
from drivetrain.importing.recognise import read
from drivetrain.importing.verb import import_files

ACCEPTS = re.compile(r"--without (\S+) ")  # in the fix of a problem: the key that may be dropped


def imported(board: Board, user: User, files: Mapping[str, str], without: Sequence[str]) -> dict[str, Any]:
    """Returns the run file that configurations become, and what became of each key. files: their texts by name.

    Raises UserError with every problem, and Refusal for files that the user may not name.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-board-") as made:
        folder = Path(made).resolve() / "files"
        output = folder.parent / "run.yaml"
        folder.mkdir()
        places = [_written(folder, name, text) for name, text in files.items()]
        try:
            if not board.is_trusted(user):
                _refuse_foreign(board, places)
            found = import_files(places, None, output, without=without)
        except UserError as error:
            raise UserError([_outside(folder, each) for each in error.problems]) from None
        if found.output is None:
            raise problem("files", "nothing is trained by these", "evaluate, predict or chat with the run instead")
        text = run_file.edited(output.read_text(encoding="utf-8"), {}, ["output"])  # the board's own
        text = _named(text, places[0].stem)
        notes = [(label.replace(f"{folder}/", ""), note) for label, note in found.notes]
        return {
            "yaml": text.replace(f"{folder}/", ""),
            "notes": [{"file": file, "key": n.key, "fate": n.fate, "why": n.why} for file, n in notes],
            "missing": [each.replace(f"{folder}/", "") for each in found.missing],
        }


def _written(folder: Path, name: str, text: str) -> Path:
    """Writes an upload, and returns its place. Raises UserError for what no file system takes."""
    if NAME.fullmatch(name) is None:
        raise problem("files", f"{name!r} is no name of a file", "give names without folders")
    try:
        (folder / name).write_text(text, encoding="utf-8", newline="")
    except (OSError, UnicodeError) as error:
        raise problem("files", f"{name!r} cannot be kept: {error}", "give it another name, and UTF-8") from None
    return folder / name


def accepts(problems: Sequence[Problem]) -> list[str]:
    """Returns the keys that may be dropped although something else is trained without them; empty where another
    problem stands in the way."""
    keys = [ACCEPTS.search(each.fix) for each in problems]
    return list(dict.fromkeys(found[1] for found in keys if found)) if all(keys) else []


def _refuse_foreign(board: Board, files: Sequence[Path]) -> None:
    """Raises UserError for files that a configuration names, which the importer would read, and that lie outside the
    board's folders."""
    problems = []
    for file in files:
        raw = read(file).raw
        problems += [replace(each, field=f"{file.name}: {each.field}") for each in board.run_places.problems(raw)]
        up = [key for key, text in texts_of(raw) if ".." in PurePosixPath(text).parts]
        problems += [Problem(f"{file.name}: {key}", "leads out of a folder by ..", FIX) for key in up]
    if problems:
        raise UserError(problems)


def _outside(folder: Path, found: Problem) -> Problem:
    """Returns a problem without the folder that was made for the files."""
    return Problem(*(text.replace(f"{folder}/", "") for text in (found.field, found.why, found.fix)))


def _named(text: str, name: str) -> str:
    """Returns a run file with a name, below the comment that begins it."""
    if re.search(r"^name:", text, re.MULTILINE):
        return text
    lines = text.splitlines(keepends=True)
    first = next((at for at, line in enumerate(lines) if not line.startswith("#") and line.strip()), len(lines))
    plain = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "imported"
    return "".join([*lines[:first], f"name: {plain}\n", *lines[first:]])
