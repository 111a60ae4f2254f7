"""YAML and JSON that people write: run files, overrides, and the configurations of other software.

Three bounds keep any file, however it is made, from taking more than seconds or all memory: its size, its depth of
nesting, and its number of values with every alias written out.
"""

from __future__ import annotations

import difflib
import errno
import json
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

from drivetrain.errors import UserError, clipped, problem, shown

RUN_FILES = (".yaml", ".yml")
MOST_YAML_BYTES = 2**20  # the reader takes some microseconds a byte
MOST_JSON_BYTES = 2**24
MOST_VALUES = 20_000
MOST_LEVELS = 64
MOST_NAME, MOST_PATH = 255, 4000  # bytes: Linux and macOS take no more
MOST_QUOTED = 200  # characters of a parser's own words


class BrokenText(ValueError):
    """A text that is not valid YAML or JSON, or is beyond the bounds. The message completes "the file ...". index: of
    the character at which the reader gave up; None where no single one is to blame."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML 1.2 file. Raises UserError if it is missing, empty, broken, beyond the bounds, or
    no mapping."""
    try:
        raw = parsed_yaml(read_text(path, MOST_YAML_BYTES))
    except BrokenText as error:
        raise problem(str(path), str(error), "correct the file and try again") from None
    if raw is None:
        raise problem(str(path), "the file is empty", "a run file needs at least workload, batch_size and loop")
    if not isinstance(raw, dict):
        raise problem(
            str(path), f"holds a {type(raw).__name__}, not a mapping of keys", "write lines such as `batch_size: 64`"
        )
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file. Raises UserError if it is missing, broken, out of bounds, no mapping, or
    repeats a key."""
    try:
        raw = parsed_json(read_text(path, MOST_JSON_BYTES))
    except BrokenText as error:
        raise problem(str(path), str(error), "correct the file and try again") from None
    if not isinstance(raw, dict):
        raise problem(str(path), f"holds a {type(raw).__name__}, not a mapping of keys", "write {...}")
    return raw


def parsed_yaml(text: str) -> Any:
    """Returns the value of a YAML 1.2 text, with only the types that JSON has. Raises BrokenText with the reason."""
    try:
        _check_bounds(text)
        yaml = YAML(typ="safe", pure=True)
        yaml.Constructor = _PlainConstructor
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        index = mark.index if mark is not None else None
        raise BrokenText(f"broken YAML{where}: {str(error.problem)[:MOST_QUOTED]}", index) from None
    except BrokenText:
        raise
    except (
        YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # as `!!bool maybe`
        raise BrokenText(f"broken YAML: {str(error)[:MOST_QUOTED]}") from None


def parsed_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises BrokenText with the reason."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise BrokenText(f"is nested in more than {MOST_LEVELS} levels") from None
    except ValueError as error:
        raise BrokenText(f"broken JSON: {str(error)[:MOST_QUOTED]}") from None
    check_levels(value)
    return value


def check_levels(value: Any) -> None:
    """Raises BrokenText if lists and mappings are nested more than MOST_LEVELS deep."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        collections = [node for node in level if isinstance(node, dict | list)]
        level = [part for node in collections for part in (node.values() if isinstance(node, dict) else node)]
    if level:
        raise BrokenText(f"is nested in more than {MOST_LEVELS} levels")


def read_text(path: Path, most_bytes: int) -> str:
    """Returns the text of a regular file; a pipe or a device might never end. Raises UserError if it is unreadable or
    too large."""
    cure = "give a readable UTF-8 text file"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise problem(str(path), "cannot be read: it is a folder, a pipe or a device", cure)
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            why = f"has more than {most_bytes / 2**20:g} MiB, which no such file needs"
            raise problem(str(path), why, "keep data in files of their own")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        if path.suffix not in RUN_FILES and len(path.parts) > 1:
            refuse_mistyped_run(path)
        near = difflib.get_close_matches(path.name, _beside(path), n=1)
        meant = path.parent / near[0] if near else near_run(path)
        hint = "drivetrain init writes a run file to begin with"
        if meant:
            hint = f"did you mean {meant}?"
        elif path.parent.name == "recipes":  # which pages name as they lie in a checkout; the package has them too
            hint = f"drivetrain init {path.stem} writes a recipe of that name here, and drivetrain recipes lists all"
        raise problem(str(path), "there is no such file", hint) from None
    except UnicodeDecodeError as error:
        raise problem(str(path), f"cannot be read: {error}", cure) from None
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL character in its name
        raise problem(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}", cure) from None


def refuse_mistyped_run(folder: Path) -> None:
    """Raises UserError for a folder that is not there, but would lie among runs."""
    runs = {found.parent.name: str(found.parent) for found in sorted(folder.parent.glob("*/run.yaml"))}
    if runs:
        near = difflib.get_close_matches(folder.name, runs, n=1)
        fix = f"did you mean {runs[near[0]]}?" if near else clipped(f"there are {', '.join(runs.values())}", 200)
        raise problem(str(folder), "there is no such folder", fix)


def near_run(path: Path) -> Path | None:
    """Returns the folder of a run below runs/ whose name is one word, or nearly so; None where there is none."""
    if len(path.parts) != 1:
        return None
    folders = {file.parent.name: file.parent for file in Path("runs").glob("*/run.yaml")}
    near = difflib.get_close_matches(path.stem, folders, n=1)
    return folders[near[0]] if near else None


def path_exists(path: str | Path) -> bool:
    """Returns whether something is at a path; False for a text that no file system takes as one."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def usable_path(given: str | Path) -> Path:
    """Returns a path that a file could have. Raises UserError for one that no file system takes or a link to itself.

    given: a text from the command line, or an option's default.
    """
    text = str(given)
    why = no_path(text) or ("it is a link that leads to itself" if _is_endless(Path(text)) else None)
    if why is not None:
        raise problem(shown(text), f"is no path: {why}", "correct it")
    return Path(text)


def _is_endless(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def no_path(text: str) -> str | None:
    """Returns why a text cannot be the path of a file; None if it can."""
    if not text:
        return "it is empty"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "there is no such user"
    long = len(text) > MOST_PATH or any(len(part.encode("utf-8", "replace")) > MOST_NAME for part in text.split("/"))
    return no_text(text) or (f"a name has at most {MOST_NAME} bytes, a path {MOST_PATH}" if long else None)


def no_text(text: str) -> str | None:
    """Returns why a text cannot be written into a file; None if it can."""
    if "\0" in text:
        return "it has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return None


def _beside(path: Path) -> list[str]:
    """Returns files of the same folder with the same ending."""
    try:
        return [each.name for each in path.parent.iterdir() if each.suffix[:2] == path.suffix[:2]]
    except OSError:
        return []


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} is given twice")
    return dict(pairs)


# --- YAML within bounds ----------------------------------------------------------------------------------------------


class _PlainConstructor(SafeConstructor):
    """Builds only the types that JSON has. YAML 1.2 has no dates: a date is read as a text."""

    def construct_yaml_str(self, node: Any) -> str:
        value: str = super().construct_yaml_str(node)
        value.encode()  # ValueError for half a character
        return value

    def construct_yaml_int(self, node: Any) -> int:
        value: int = super().construct_yaml_int(node)
        str(value)  # ValueError where 0xfff... has so many digits that no run.yaml could hold it
        return value


_KEPT = ("null", "bool", "int", "float", "str", "seq", "map")
_PlainConstructor.yaml_constructors = {
    tag: make
    for tag, make in SafeConstructor.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _KEPT
} | {
    "tag:yaml.org,2002:int": _PlainConstructor.construct_yaml_int,
    "tag:yaml.org,2002:str": _PlainConstructor.construct_yaml_str,
    "tag:yaml.org,2002:timestamp": _PlainConstructor.construct_yaml_str,
}


@dataclass
class _Collection:
    """A sequence or mapping that is being read. first: values before it; levels: its depth, counting itself."""

    anchor: str | None
    first: int
    levels: int = 1


def _check_bounds(text: str) -> None:
    """Raises BrokenText as soon as a text nests too deeply or, with its aliases written out, holds too many values."""
    bounds = _Bounds()
    for event in YAML(typ="safe", pure=True).parse(text):
        bounds.see(event)


class _Bounds:
    def __init__(self) -> None:
        self.values = 0
        self.opened: list[_Collection] = []
        self.named: dict[str, tuple[int, int]] = {}  # anchor → values and levels of what it names

    def see(self, event: Any) -> None:
        if isinstance(event, AliasEvent):
            if any(event.anchor == each.anchor for each in self.opened):
                raise BrokenText(f"the alias *{event.anchor} refers to itself")
            self._add(*self.named.get(event.anchor, (1, 0)))
        elif isinstance(event, CollectionEndEvent):
            ended = self.opened.pop()
            if ended.anchor is not None:
                self.named[ended.anchor] = (self.values - ended.first, ended.levels)
            self._add(0, ended.levels)
        elif isinstance(event, NodeEvent):
            if isinstance(event, CollectionStartEvent):
                self.opened.append(_Collection(event.anchor, self.values))
            self._add(1, 0)

    def _add(self, values: int, levels: int) -> None:
        self.values += values
        if self.opened:
            self.opened[-1].levels = max(self.opened[-1].levels, levels + 1)
        if len(self.opened) + levels > MOST_LEVELS:
            raise BrokenText(f"is nested in more than {MOST_LEVELS} levels")
        if self.values > MOST_VALUES:
            raise BrokenText(f"is too large: more than {MOST_VALUES:,} values, each alias counted as what it repeats")
