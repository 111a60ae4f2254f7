"""Writes the run file to disk: aside, reads it back, compares, and only then puts it in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from drivetrain.config.files import read_yaml
from drivetrain.config.translation import Note
from drivetrain.errors import UserError, problem
from drivetrain.runtime.atomic_file import followed

WIDTH = 118
MOST_KEYS = 8  # named for one reason; the list on the screen has all
ABOUT = {
    "changed": "Not quite the same:",
    "refused": "Not taken over:",
    "later": "Not built yet:",
}


def header(made: str, notes: Iterable[Note], defaults: Sequence[Note]) -> str:
    """Returns comment lines: the sources of the run file, and what differs from them."""
    lines = [f"Imported from {made}."]
    grouped: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        if note.fate in ABOUT:
            grouped.setdefault((note.fate, note.why), []).append(note.key)
    for fate, title in ABOUT.items():
        if any(fate == of for of, _ in grouped):
            lines.append(title)
            lines += [f"  {_some(keys)}: {why}" for (of, why), keys in grouped.items() if of == fate]
    if defaults:
        lines.append("What the sources leave to their software, written out:")
        lines += [f"  {note.to}: {in_yaml(note.value)}" for note in defaults]
    return "".join(f"# {part}\n" for line in lines for part in _wrapped(line))


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - MOST_KEYS
    return ", ".join(keys[:MOST_KEYS]) + (f" and {more} more" if more > 0 else "")


def _wrapped(line: str) -> list[str]:
    """Wraps within WIDTH, and removes characters that could end a comment."""
    indent = " " * (len(line) - len(line.lstrip()))
    words = "".join(c if c.isprintable() else "?" for c in line).split()
    lines = [indent]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH and lines[-1].strip():
            lines.append(indent + "  ")
        lines[-1] += ("" if lines[-1].endswith(" ") or not lines[-1] else " ") + word
    return lines


def check_place(path: Path, overwrite: bool, sources: Sequence[Path]) -> None:
    """Raises UserError if nothing may be written there."""
    field = "--output"
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise problem(field, f"{path} does not end in .yaml", "give a YAML file")
    if path.exists() and not path.is_file():
        raise problem(field, f"{path} is a folder, a pipe or a device", "give a file")
    if not path.parent.is_dir():
        raise problem(field, f"there is no folder {path.parent}", "make it, or give another")
    if followed(path) in set(map(followed, sources)):
        raise problem(field, f"{path} is one of the files that are imported", "give another")
    if path.exists() and not overwrite:
        raise problem(field, f"{path} exists already", "give another, or --overwrite")


def write(path: Path, text: str, raw: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.stem}-{os.getpid()}.yaml")
    try:
        aside.write_text(text, encoding="utf-8")
        if not _holds(aside, raw):
            why = "some value cannot be written as YAML and read back as it was"
            raise problem("--output", why, "take control characters out of the keys and values")
        os.replace(aside, path)
    except OSError as error:
        raise problem("--output", f"{path} cannot be written: {error.strerror}", "give another file") from None
    finally:
        aside.unlink(missing_ok=True)


def _holds(path: Path, raw: dict[str, Any]) -> bool:
    try:
        return read_yaml(path) == raw
    except UserError:
        return False


def as_yaml(raw: dict[str, Any]) -> str:
    """Returns blocks on lines of their own, lists of values in one line."""
    yaml = YAML(typ="rt", pure=True)
    yaml.default_flow_style = False
    yaml.width = 4096
    stream = StringIO()
    try:
        yaml.dump(_flowing(raw), stream)
    except (YAMLError, TypeError, ValueError) as error:
        raise problem("the run file", f"cannot be written as YAML: {error}", "look at the values") from None
    return stream.getvalue()


def in_yaml(value: Any) -> str:
    """Returns a value as a run file has it, in one line."""
    yaml = YAML(typ="rt", pure=True)
    yaml.default_flow_style = True
    yaml.width = 2**20
    stream = StringIO()
    yaml.dump([_flowing(value)], stream)  # a list, because a value by itself would be a document with its end marked
    return stream.getvalue().strip()[1:-1]


def _flowing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _flowing(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = CommentedSeq(map(_flowing, value))
        if not any(isinstance(part, dict) for part in value):
            parts.fa.set_flow_style()
        return parts
    if isinstance(value, str):
        # ruamel.yaml 0.19 writes these plain in a list, and does not read them there; a Name is no plain text to YAML
        return DoubleQuotedScalarString(value) if value.startswith(("?", ":")) else str(value)
    return value
