"""One file of other software, and its translation. Every key it holds ends up with a note."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivetrain.config.translation import Note, Translation
from drivetrain.errors import Problem
from drivetrain.importing.write import in_yaml

UNKNOWN_KEY = "no such key is known"
MOST_VALUES = 20_000  # an alias that refers to itself, or doubles at each level, passes it
DEEPEST = 50


@dataclass(frozen=True)
class Source:
    """A file that was read. label: the user's name for it; prefix: of its keys, if it stands within another file."""

    label: str
    kind: str
    raw: dict[str, Any]
    folder: Path
    prefix: str = ""


@dataclass(frozen=True)
class Default:
    """A default of the other software."""

    key: str
    value: Any


@dataclass
class TranslatedFile:
    """The translation of a source. `translation.settings` holds its settings, `defaults` what it leaves to its
    software.

    soft: fields that it sets only to their defaults; another file's value counts more.
    """

    source: Source
    translation: Translation = field(default_factory=Translation)
    soft: set[str] = field(default_factory=set)
    defaults: dict[str, Default] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        return self.translation.notes

    def key_of(self, field_name: str) -> str | None:
        """Returns the key that became this field."""
        return next((note.key for note in self.notes if note.to == field_name), None)


# --- every key ---------------------------------------------------------------------------------------------------


def leaves(raw: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields dotted keys of all values without further keys. A list of mappings counts as a mapping of positions."""
    if isinstance(raw, list) and any(isinstance(part, dict) for part in raw):
        raw = {str(position): part for position, part in enumerate(raw)}
    if isinstance(raw, dict) and raw:
        for name, value in raw.items():
            yield from leaves(value, (*path, str(name)))
    elif path:
        yield ".".join(path)


def complete(found: TranslatedFile, known: Sequence[str]) -> None:
    """Adds a note to every key that has none yet: its block's, or that it was not used.

    known: names a misspelt key may have meant.
    """
    notes = [_named(note, known) for note in found.notes]
    noted = {note.key: note for note in notes}
    prefix = found.source.prefix
    keys = [prefix + key for key in leaves(found.source.raw)]
    notes += [_inherited(key, noted) for key in keys if key not in noted]
    blocks = {key[:end] for key in keys for end in range(len(key)) if key[end] == "."} - {*keys}  # their keys have it
    found.translation.notes = [n for n in notes if n.key not in blocks or n.fate in ("mapped", "changed")]


def _inherited(key: str, noted: Mapping[str, Note]) -> Note:
    block = key
    while "." in block:
        block = block.rsplit(".", 1)[0]
        above = noted.get(block)
        if above is not None:
            if above.fate in ("mapped", "changed"):
                return Note(key, "mapped", f"read with {block}")
            return replace(above, key=key)
        refused = next((n for n in noted.values() if n.fate == "refused" and n.key.startswith(f"{block}.")), None)
        if refused is not None:
            return Note(key, "refused", f"so is {refused.key}")
    return Note(key, "refused", "nothing reads it")


def _named(note: Note, known: Sequence[str]) -> Note:
    if note.fate != "refused" or note.why != UNKNOWN_KEY:
        return note
    near = difflib.get_close_matches(note.key.rsplit(".", 1)[-1], known, n=1, cutoff=0.75)
    return replace(note, why=f"{UNKNOWN_KEY}; did you mean {near[0]}?") if near else note


# --- one file, one word ----------------------------------------------------------------------------------------------


def settle(found: TranslatedFile) -> None:
    """Settles two keys of a file about one field: a switch that is off yields, other differences are problems."""
    for saying in list(found.translation.conflicts()):
        name = saying[0].to
        if all(isinstance(note.value, bool) for note in saying):
            found.translation.settings[name] = True
            on = next(note.key for note in saying if note.value)
            off = {note: Note(note.key, "unneeded", f"{on} is on") for note in saying if not note.value}
            found.translation.notes = [off.get(note, note) for note in found.notes]
        else:
            statements = ", ".join(f"{note.key} says {in_yaml(note.value)}" for note in saying)
            keys = " and ".join(note.key for note in saying)
            taken = in_yaml(found.translation.settings[name])
            found.problems.append(
                Problem(keys, f"{statements}, and all of them mean {name}", f"keep one of them; {taken} would be taken")
            )


# --- what a file may hold ------------------------------------------------------------------------------------------


def plain(raw: Any) -> Any:
    """Returns the value with keys as text. Raises ValueError if no run file could hold it: it refers to itself, is
    huge, has a NaN."""
    counted = iter(range(MOST_VALUES))

    def copied(value: Any, depth: int) -> Any:
        if depth > DEEPEST or next(counted, None) is None:
            raise ValueError("it refers to itself, or is too large for a configuration")
        if isinstance(value, dict):
            return {copied(str(key), depth + 1): copied(part, depth + 1) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [copied(part, depth + 1) for part in value]
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("it has a NaN, which is no value")
        if isinstance(value, str):
            value.encode()  # half a character is no text: UnicodeEncodeError, a ValueError
        return value

    return copied(raw, 0)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
