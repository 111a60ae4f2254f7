"""Text files that people write: run files, and the configurations of other software."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from drivetrain.errors import problem


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file. UserError if it is missing, empty, broken, or no mapping."""
    try:
        raw = YAML(typ="safe", pure=True).load(_text(path))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise problem(str(path), f"broken YAML{where}: {error.problem}", "correct the line and try again") from None
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        raise problem(str(path), f"broken YAML: {error}", "correct the file and try again") from None
    if raw is None:
        raise problem(str(path), "the file is empty", "a run file needs at least workload, batch_size and loop")
    if not isinstance(raw, dict):
        raise problem(
            str(path), f"holds a {type(raw).__name__}, not a mapping of keys", "write lines such as `batch_size: 64`"
        )
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file. UserError if it is missing, broken, no mapping, or says a key twice."""
    try:
        raw = json.loads(_text(path), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise problem(str(path), f"broken JSON: {error}", "correct the file and try again") from None
    if not isinstance(raw, dict):
        raise problem(str(path), f"holds a {type(raw).__name__}, not a mapping of keys", "write {...}")
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = {key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} is given twice")
    return dict(pairs)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob(f"*{path.suffix[:2]}*")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "recipes/ has run files as examples"
        raise problem(str(path), "there is no such file", hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise problem(str(path), f"cannot be read: {error}", "give a readable UTF-8 text file") from None
