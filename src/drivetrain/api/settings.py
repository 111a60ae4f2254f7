"""Arguments of Python → keys of a run file, by the resolver of the command line."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.api.script_name import script_name
from drivetrain.config.engines import block_of
from drivetrain.config.files import read_yaml
from drivetrain.config.load import left_open, place_in, resolve_key, validate
from drivetrain.config.location import store_address
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, problem
from drivetrain.inference.remote_places import run_file_here

TAGS = ("type", "name", "method", "format")  # keys of a block that say which of several kinds it is
SHORT = {"optimizer": "name", "schedule": "name"}  # a text stands for this key of the block
RunFile = str | os.PathLike[str] | Mapping[str, Any]


def on_this_machine(run_file: RunFile, argument: str = "run_file") -> RunFile:
    """Returns the copy of a run file, or of a mirrored run's run.yaml, that is named by an address in a store, and
    anything else unchanged. Raises UserError if nothing can be read there."""
    if not isinstance(run_file, str | os.PathLike) or store_address(os.fspath(run_file)) is None:
        return run_file
    return run_file_here(os.fspath(run_file), argument)


def read_run(
    run_file: RunFile | None, given: Mapping[str, Any], dotted: Mapping[str, Any] | None = None
) -> tuple[RunConfig | None, list[Problem], Path | None]:
    """Reads a run file, or a mapping of the same keys, with arguments in place of its values.

    `given`, `dotted`: as in `with_arguments`. Returns the run (None if too much is wrong to build one), all problems of
    its schema, and the file.
    """
    raw, file = raw_of(run_file)
    problems = with_arguments(raw, {**given, **(dotted or {})})
    name = script_name() if file is None else file.stem
    if name is not None:
        raw.setdefault("name", name)
    return *validate(raw, problems), file


def open_fields(run_file: RunFile | None, given: Mapping[str, Any]) -> list[str]:
    """Returns the fields that are left to a plan."""
    raw, _ = raw_of(run_file)
    with_arguments(raw, given)
    return left_open(raw)


def raw_of(run_file: RunFile | None) -> tuple[dict[str, Any], Path | None]:
    """Returns the keys of a run file, or of a mapping, and the file. Raises UserError if it cannot be read."""
    if run_file is None:
        return {}, None
    if isinstance(run_file, Mapping):
        return plain(run_file), None
    if not isinstance(run_file, str | os.PathLike):
        why = f"a {type(run_file).__name__} was given"
        raise problem("run_file", why, "give the path of a run file, a mapping of its keys, or model=...")
    path = Path(run_file)
    return read_yaml(path), path


def with_arguments(raw: dict[str, Any], given: Mapping[str, Any]) -> list[Problem]:
    """Puts arguments into a run file's keys, in place. Returns the problems of the arguments.

    `given`: keys as the command line takes them, the whole path of one or its end where that is unique (lr). The value
    of a key takes the place of what is there; a mapping changes the keys that it names and leaves the others, unless it
    names another kind of block (another engine, another type of workload).
    """
    problems: list[Problem] = []
    for key, value in given.items():
        try:
            path = resolve_key(str(key))
        except UserError as error:
            problems += error.problems
            continue
        value = plain(value)
        if isinstance(value, str) and len(path) == 1 and path[0] in SHORT:
            value = {SHORT[path[0]]: value}
        node, name = place_in(raw, path)
        node[name] = _merged(node.get(name), value, path)
    return problems


def _merged(before: Any, value: Any, path: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    if isinstance(before, str) and path == ["engine"]:
        before = block_of(before)
    if not isinstance(before, dict) or (path != ["optimizer"] and _other_kind(before, value)):
        return value
    return {**before, **{key: _merged(before.get(key), each, [*path, key]) for key, each in value.items()}}


def _other_kind(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return any(tag in value and value[tag] != before.get(tag) for tag in TAGS)


def plain(value: Any) -> Any:
    """Returns a value as a run file has it: paths as texts, tuples as lists, NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    return copy.copy(value)
