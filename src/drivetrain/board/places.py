"""Judges where the paths of requests lead. They may lead into the folders of the board, to nothing hidden there, and
never into the board's own folder, which holds the administrator's token.

A run file is read by the user who started the board, and what it names comes back in previews, logs and predictions.
So each text of it is judged as the readers of data would take it: as a path with ~ and links followed, and as a pattern
whose every match is judged too. Readers match no hidden names by wildcards, and neither does this.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.files import no_text
from drivetrain.data.shard_paths import expanded, num_expanded
from drivetrain.errors import Problem

LONGEST = 4096  # characters; the system takes no longer path
MOST_NAMES = 100_000  # that are looked at for the patterns of a run file
MARKS = "*?[{"
FIX = "ask the administrator, who can start the board with --operators-code, or give a file below --data or --runs"


@dataclass(frozen=True)
class Places:
    """roots: folders in which paths may lie; own: the board's. All of them with links followed."""

    roots: tuple[Path, ...]
    own: Path

    def holds(self, place: Path) -> bool:
        """Returns whether requests may name a place. place: with links followed."""
        if place.is_relative_to(self.own):
            return False
        below = [place.relative_to(root) for root in self.roots if place.is_relative_to(root)]
        return any(not any(part.startswith(".") for part in each.parts) for each in below)

    def problems(self, values: Any) -> list[Problem]:
        """Returns the problems of a run file's values whose texts, as paths or patterns, lead where they may not."""
        looked = _Looked()
        named = [(key, text) for key, text in texts_of(values) if len(text) <= LONGEST and no_text(text) is None]
        return [Problem(key or "yaml", why, FIX) for key, text in named if (why := self._refusal(text, looked))]

    def _refusal(self, text: str, looked: _Looked) -> str | None:
        try:
            for place in _led_to(text, looked):
                if not self.holds(place):
                    return f"{text} lies outside the folders of this board, or is hidden in them"
        except _TooManyNames:
            return f"{text} needs a look at more than {MOST_NAMES:,} names, together with the patterns before it"
        except _GoesUp:
            return f"{text} is a pattern that goes up by .., which may lead outside the folders of this board"
        return None


def texts_of(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) for all texts of a run file's values; those of a list have the list's key."""
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, dict):
        for key, inner in values.items():
            yield from texts_of(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for inner in values:
            yield from texts_of(inner, path)


class _TooManyNames(Exception):
    """Patterns stand for too many names."""


class _GoesUp(Exception):
    """A pattern has wildcards, and .. among its parts."""


class _Looked:
    """Counts the names that are looked at for patterns, so that no request takes minutes."""

    def __init__(self) -> None:
        self._count = 0

    def at(self, names: int) -> None:
        self._count += names
        if self._count > MOST_NAMES:
            raise _TooManyNames


def _led_to(text: str, looked: _Looked) -> Iterator[Path]:
    """Yields the places, links followed, that a text leads to: with ~ as it is, and as the folder of a user."""
    yield from _places(Path(text), looked)
    if text.startswith("~"):
        with suppress(RuntimeError):
            yield from _places(Path(text).expanduser(), looked)


def _places(given: Path, looked: _Looked) -> Iterator[Path]:
    text = str(given)
    if os.path.lexists(given) or not any(mark in text for mark in MARKS):
        if _begins(given):
            yield followed(given)
        return
    looked.at(num_expanded(text))
    for each in {given, *map(Path, expanded(text))}:
        if any(mark in str(each) for mark in MARKS) and ".." in each.parts:
            raise _GoesUp
        if _begins(each):
            yield followed(each)  # also without a match: what it matches tomorrow lies there too
        for found in _matches(each, looked):
            yield followed(found)


def followed(path: Path) -> Path:
    """Returns a path with links followed, as far as it is there; one that leads to itself is unchanged."""
    return Path(os.path.realpath(path))


def _begins(given: Path) -> bool:
    """Returns whether a text is a path rather than a word: its first folder or file is there. /no_think begins with a
    slash, and is a word."""
    first = 2 if given.is_absolute() else 1
    return bool(given.parts) and os.path.lexists(Path(*given.parts[:first]))


def _matches(pattern: Path, looked: _Looked) -> set[Path]:
    """Returns what a pattern matches for the readers of data: wildcards within a name, ** through all folders."""
    anchor = Path(pattern.anchor)
    found = {anchor}
    for part in pattern.relative_to(anchor).parts:
        if part == "**":
            found = _all_below(found, looked)
        elif glob.has_magic(part):
            found = {
                folder / name for folder in found for name in _names(folder, looked) if fnmatch.fnmatch(name, part)
            }
        else:
            found = {folder / part for folder in found if os.path.lexists(folder / part)}
    return found - {anchor}


def _all_below(folders: set[Path], looked: _Looked) -> set[Path]:
    found, waiting = set(folders), [*folders]
    while waiting:
        folder = waiting.pop()
        new = {folder / name for name in _names(folder, looked)} - found
        found |= new
        waiting += new
    return found


def _names(folder: Path, looked: _Looked) -> Iterator[str]:
    """Yields the names in a folder that are not hidden."""
    with suppress(OSError), os.scandir(folder) as listed:
        for each in listed:
            looked.at(1)
            if not each.name.startswith("."):
                yield each.name
