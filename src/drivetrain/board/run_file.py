"""Run files as texts: read, changed with their comments kept, and checked by what the command line checks with."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarfloat import ScalarFloat
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from drivetrain.board.yaml_places import at, placed
from drivetrain.config import rules
from drivetrain.config.engines import block_of
from drivetrain.config.files import MOST_YAML_BYTES, BrokenText, parsed_yaml
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, problem, shown
from drivetrain.init.catalogue import recipe
from drivetrain.objects import held
from drivetrain.runtime.strict_json import plain

WIDTH = 118
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@+-]*")  # texts that are no other thing in any place of YAML
RESULTS = "the board puts each run into a folder of its own, under its name"


@dataclass(frozen=True)
class Checked:
    """run: with its open fields filled in for the machine; None where too much is wrong. text: what was checked, valid
    YAML."""

    text: str
    run: RunConfig | None
    problems: list[Problem]
    notices: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ready": not self.problems,
            "problems": [each.as_dict() for each in placed(self.text, self.problems)],
            "notices": self.notices,
            "resolved": None if self.run is None else plain(self.run.model_dump(mode="json")),
        }


def values_of(text: str) -> dict[str, Any]:
    """Returns the keys of a run file. Raises UserError for a text that is none."""
    if len(text.encode()) > MOST_YAML_BYTES:
        raise problem("yaml", f"has more than {MOST_YAML_BYTES / 2**20:g} MiB", "keep data in files of their own")
    try:
        found = parsed_yaml(text)
    except BrokenText as error:
        index = error.index
        found = Problem("yaml", str(error), "correct the text")
        raise UserError([found if index is None else at(found, text, index, index + 1)]) from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise problem("yaml", f"is a {type(found).__name__}, not a mapping of keys", "write lines as batch_size: 64")
    return found


def check(text: str, machine: Machine) -> Checked:
    """Checks schema and rules of this machine, as `train` does first. Never reads data."""
    raw = values_of(text)
    raw.setdefault("name", "run")
    problems = []
    if raw.get("output") is not None:
        problems.append(Problem("output", RESULTS, "leave output out"))
    open_ = [name for name in ("engine", "precision") if raw.get(name) == "auto"]
    run, problems = validate({key: value for key, value in raw.items() if key not in open_}, problems)
    if run is None:
        return Checked(text, None, problems, [])
    if run.workload.needs_objects and not held.held():
        return Checked(text, None, [*problems, *held.missing().problems], [])
    run, problems = rules.judged(run, problems, machine)
    problems += run.workload.file_problems()
    notes = [f"{name}: auto is chosen by a plan when the run starts" for name in open_]
    return Checked(text, run, problems, [*notes, *notices(run, machine, problems)])


def edited(text: str, changes: Mapping[str, Any], removed: Sequence[str]) -> str:
    """Returns the text with keys set and removed, and all comments that stood beside others.

    changes: values by dotted key. Raises UserError for a text that is no run file.
    """
    values_of(text)  # within bounds, and no tags of Python's
    yaml = _round_trip()
    document = yaml.load(text)
    if document is None:
        document = CommentedMap()
        if text.strip():  # comments alone
            document.yaml_set_start_comment("\n".join(line.lstrip("# ") for line in text.strip().splitlines()))
    for key in removed:
        _remove(document, key.split("."))
    for key, value in changes.items():
        _set(document, key.split("."), value)
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


class _ExactFloats(RoundTripRepresenter):
    """Writes numbers as they were written, except where ruamel's own way would change the last digit."""

    def represent_scalar_float(self, data: Any) -> Any:
        node = super().represent_scalar_float(data)
        if parsed_yaml(node.value) != float(data):
            node.value = repr(float(data))
        return node


_ExactFloats.add_representer(ScalarFloat, _ExactFloats.represent_scalar_float)


def _round_trip() -> YAML:
    yaml = YAML(typ="rt", pure=True)
    yaml.Representer = _ExactFloats
    yaml.preserve_quotes = True
    yaml.width = WIDTH
    return yaml


def _set(document: Any, path: list[str], value: Any) -> None:
    node = document
    for part in path[:-1]:
        below = node.get(part) if isinstance(node, dict) else None
        if isinstance(below, str) and part == "engine":  # `engine: ddp`, then a key of its block
            below = node[part] = CommentedMap(block_of(below))
        if not isinstance(below, dict):
            below = node[part] = CommentedMap()
        node = below
    node[path[-1]] = _quoted(value)


def _quoted(value: Any) -> Any:
    """Returns a value whose texts have quotes, except words that need none in any place."""
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return DoubleQuotedScalarString(value)
    if isinstance(value, dict):
        return {key: _quoted(each) for key, each in value.items()}
    return [_quoted(each) for each in value] if isinstance(value, list) else value


def _remove(document: Any, path: list[str]) -> None:
    node, above = document, []
    for part in path[:-1]:
        if not isinstance(node, dict) or part not in node:
            return
        above.append((node, part))
        node = node[part]
    if not isinstance(node, dict) or path[-1] not in node:
        return
    del node[path[-1]]
    for owner, part in reversed(above):  # a block without keys says nothing
        if owner[part]:
            break
        del owner[part]


def command(text: str, name: str | None) -> dict[str, Any]:
    """Returns the lines to type for a run file that began as a recipe: overrides where they can say what differs, else
    the whole text as a file. Raises UserError for an unknown recipe."""
    values = values_of(text)
    if name is not None:
        changed = _overrides(values_of(recipe(name).read_text(encoding="utf-8")), values)
        if changed is not None:
            made = ["drivetrain", "init", name, "--output", "run.yaml"]
            return {
                "lines": [shlex.join(made), shlex.join(["drivetrain", "train", "run.yaml", *changed])],
                "file": None,
            }
    return {"lines": ["drivetrain train run.yaml"], "file": text}


def _overrides(base: Any, values: Any, prefix: str = "") -> list[str] | None:
    """Returns key=value words that make `values` of `base`; None where words cannot take a key away."""
    found: list[str] = []
    if base.keys() - values.keys():
        return None
    for key, value in values.items():
        path, before = f"{prefix}{key}", base.get(key)
        if key in base and before == value and type(before) is type(value):
            continue
        if isinstance(value, dict) and isinstance(before, dict) and value:
            below = _overrides(before, value, f"{path}.")
            if below is None:
                return None
            found += below
        else:
            found.append(f"{path}={flow(value)}")
    return found


def flow(value: Any) -> str:
    """Returns a value as one line of YAML: a text as it is where that is read back, anything else as JSON, which YAML
    1.2 includes (ruamel's own flow style leaves texts such as ?0 without the quotes that they need)."""
    texts = [json.dumps(value, ensure_ascii=False), json.dumps(value)]
    for text in [value, *texts] if isinstance(value, str) and PLAIN.fullmatch(value) else texts:
        with contextlib.suppress(BrokenText):
            if parsed_yaml(text) == value:
                return str(text)
    raise problem("yaml", f"{shown(value)} cannot be written as YAML", "give another value")


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by dotted key; an engine's short name as the keys that it stands for."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "engine" and isinstance(value, str):
            found[key] = value
            value = block_of(value)
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[str(key)] = value
    return found
