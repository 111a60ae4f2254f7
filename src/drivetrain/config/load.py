"""Run file + dotted overrides → a checked RunConfig, or every problem at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from drivetrain.config.adapter import adapters_of_runs
from drivetrain.config.engines import ENGINES, SHORT, block_of
from drivetrain.config.exclusive_fields import Replaced, replace_others
from drivetrain.config.field_paths import TAGS, blocks_of, field_paths
from drivetrain.config.files import BrokenText, parsed_yaml, read_yaml
from drivetrain.config.location import without_secrets
from drivetrain.config.models_of_runs import with_checkpoints
from drivetrain.config.near_names import suggestion
from drivetrain.config.run import RunConfig
from drivetrain.config.unknown import elsewhere_hint, owners_of, siblings, unknown
from drivetrain.errors import Problem, UserError, clipped, problem, shown

UNKNOWN, MISSING = "extra_forbidden", "missing"  # pydantic's names of these errors
DRIVER = ["engine", "driver"]  # its fields are those of engine, and are written in full
EXPECTED = {  # in place of pydantic's words, which name Python's types
    "is_instance_of": "input should be a path, written as a text",
    "tuple_type": "input should be a list",
    "dict_type": "input should be a mapping of keys",
    **dict.fromkeys(("model_type", "model_attributes_type"), "input should be a block of keys"),
}
FOREIGN = {  # keys of configurations that `drivetrain import` reads
    *("model_name_or_path", "num_train_epochs", "per_device_train_batch_size"),  # LLaMA-Factory, Transformers
    *("zero_optimization", "train_micro_batch_size_per_gpu"),  # DeepSpeed
    *("compute_environment", "distributed_type"),  # Accelerate
}
AUTO = "auto"
OPEN = {"engine": "single", "precision": "fp32"}  # fields that a plan can decide, and what stands there until it has
MOST_PROBLEMS = 100
MOST_KEY = 200  # characters of a key that a problem names
UNION_TAGS = {  # what pydantic puts into a location to tell which kind of block it tried
    "workload": ("image_classification", "text_classification", "language_model", "module", "objects"),
    "engine": tuple(ENGINES),
    "driver": tuple(ENGINES),
}


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig | None, list[Problem]]:
    """Read a run file and apply `key=value` overrides.

    Returns the config (None if too much is wrong to build one) and all problems of the schema. A config that comes
    with problems had the offending keys taken out: it serves to look for further problems, never to run.
    """
    raw = read_yaml(path)
    if (foreign := FOREIGN & raw.keys()) and "workload" not in raw:
        why = f"is no run file but a configuration of other software ({', '.join(sorted(foreign))})"
        return None, [Problem(str(path), why, f"drivetrain import {path} --output run.yaml makes a run file of it")]
    problems, _ = _overridden(raw, overrides)
    raw.setdefault("name", path.stem)
    return validate(raw, problems)


def replaced(path: Path, overrides: Sequence[str]) -> list[str]:
    """Returns a sentence for each value of a run file whose place an override of another field takes."""
    return [str(each) for each in _overridden(read_yaml(path), overrides)[1]]


def left_to_the_plan(path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Returns the fields, of OPEN, whose value is `auto`. Raises UserError for a file that cannot be read; wrong
    overrides are for `load` to report."""
    raw = read_yaml(path)
    _overridden(raw, overrides)
    return left_open(raw)


def left_open(raw: Mapping[str, Any]) -> list[str]:
    """Returns the fields, of OPEN, whose value is `auto` in the keys of a run file."""
    return [name for name in OPEN if raw.get(name) == AUTO]


def validate(raw: dict[str, Any], problems: list[Problem]) -> tuple[RunConfig | None, list[Problem]]:
    """Build the config; after each failure take the offending keys out, so that the rest can still be checked.

    Where the folder of a run is named as a model or an adapter, the config has that of a checkpoint
    (models_of_runs.py).
    A misspelt key's value takes the place of the key that was meant, so that this one is not reported as missing too.
    """
    moved: list[list[Any]] = []
    wrong: list[list[Any]] = []  # what was there and could not stay: it is not missing
    for _ in range(5):
        try:
            run = RunConfig.model_validate(raw)
            adapters = {} if run.adapter is None else {"adapter": adapters_of_runs(run.adapter)}
            return run.model_copy(update={"workload": with_checkpoints(run.workload), **adapters}), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        found = [(each["type"], _path_in(each["loc"], raw), _problem(each, raw)) for each in details[:MOST_PROBLEMS]]
        found = [(kind, path, each) for kind, path, each in found if kind != MISSING or not _holds(path, wrong)]
        wrong += [path for kind, path, _ in found if kind != UNKNOWN]
        moved += [place for kind, path, _ in found if kind == UNKNOWN and (place := _moved(path, raw))]
        kept = [each for kind, path, each in found if path not in moved or kind not in (UNKNOWN, MISSING)]
        problems += _once(kept)
        if len(details) > MOST_PROBLEMS:
            why = f"has {len(details):,} problems, of which {MOST_PROBLEMS} are listed"
            return None, [*problems, Problem("run file", why, "correct these first")]
        if not all([_remove(raw, path) for kind, path, _ in reversed(found) if path not in moved or kind != MISSING]):
            break
    return None, problems


# --- overrides ---------------------------------------------------------------------------------------------------


def _overridden(raw: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], list[Replaced]]:
    """Applies overrides to the keys of a run file. Returns what is wrong with them, and what they replace beside their
    own fields."""
    problems: list[Problem] = []
    given: list[tuple[str, ...]] = []
    for override in overrides:
        try:
            given.append(_apply(raw, override))
        except UserError as error:
            problems.extend(error.problems)
    return problems, replace_others(raw, given)


def _apply(raw: dict[str, Any], override: str) -> tuple[str, ...]:
    """Applies an override, and returns the path of its field."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        fix = "write key=value, e.g. precision=bf16-mixed or optimizer.lr=3e-4"
        with suppress(OSError, ValueError):  # what no path can be
            if override and Path(override).exists():
                fix = f"a file is given by an option, such as --data {override} of predict (see --help); or {fix}"
        raise problem(override, "is no override", fix)
    try:
        value = parsed_yaml(text) if text else None
    except BrokenText as error:
        raise problem(key, f"the value {shown(text)}: {error}", "correct it, or quote a text") from None
    path = resolve_key(key)
    node, name = place_in(raw, path)
    node[name] = value
    return tuple(path)


def place_in(raw: dict[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Returns the mapping of a run file that holds the last key of a path, and that key. Makes blocks that are not
    there yet."""
    node = raw
    for part in path[:-1]:
        below = node.get(part)
        if isinstance(below, str) and part == "engine":  # `engine: ddp`, then `engine.bucket_mb=...`
            below = block_of(below)
        node[part] = node = below if isinstance(below, dict) else {}
    return node, path[-1]


def resolve_key(key: str) -> list[str]:
    """Returns the full path of a dotted key. A key may be cut short from the left where only one field ends so:
    `lr`."""
    parts = key.split(".")
    paths = [path for path, _ in field_paths()]
    if parts[0] in RunConfig.model_fields:
        return parts
    matches = sorted({tuple(path) for path in paths if path[-len(parts) :] == parts and path[:2] != DRIVER})
    if len(matches) == 1:
        return list(matches[0])
    if matches:
        names = " or ".join(".".join(match) for match in matches)
        raise problem(key, "more than one field has this name", f"write {names}")
    for length in range(len(parts) - 1, 0, -1):  # inside a free-form mapping: config.hidden_sizes=[8]
        owners = {tuple(path) for path, info in field_paths() if path[-length:] == parts[:length] and _is_free(info)}
        owners = {owner for owner in owners if owner[0] != "engine"}  # whose config is a file of its own
        if len(owners) == 1:
            return [*owners.pop(), *parts[length:]]
    fix = elsewhere_hint(parts[-1]) or _nearest(key, [".".join(path) for path in paths])
    raise problem(key, "there is no such field", fix)


def _is_free(info: Any) -> bool:
    """Returns whether the field takes a mapping with keys of the user's choice."""
    return any(get_origin(part) is dict for part in (info.annotation, *get_args(info.annotation)))


# --- pydantic's errors as problems -----------------------------------------------------------------------------------


def _problem(detail: ErrorDetails, raw: dict[str, Any]) -> Problem:
    path = _path_in(detail["loc"], raw)
    field = clipped(".".join(map(str, path)), MOST_KEY) or "run file"
    if detail["type"] == UNKNOWN:
        return unknown(field, path, raw)
    if field in OPEN and raw.get(field) == AUTO:
        why = "auto is decided by a plan, which train and check make; nothing decides it here"
        return Problem(field, why, "name one; drivetrain plan shows which")
    if detail["type"] == "union_tag_invalid":
        tag, known = str(detail["ctx"]["tag"]), [name.strip("'") for name in detail["ctx"]["expected_tags"].split(", ")]
        short = [*SHORT] if path and path[0] == "engine" else []
        listed = ", ".join([*known, *(name for name in short if name.startswith("zero"))])
        fix = suggestion(tag, [*known, *short]) or "give one of them"
        return Problem(field, f"{tag} was given; there are {listed}", fix)
    info = next((info for p, info in field_paths() if p == path), None)
    documentation = info.description if info else None
    if detail["type"] == MISSING:
        return Problem(field, "is required and was not given", documentation or "add it to the run file")
    message = EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    fix = (
        str(detail.get("ctx", {}).get("fix", "")) or _meant(detail, info, field) or documentation or "correct the value"
    )
    return Problem(field, f"{without_secrets(_in_yaml(detail['input']))} was given; {message}", fix)


def _meant(detail: ErrorDetails, info: Any, field: str) -> str:
    """Returns the probable meaning of a text: a choice that is near, or the name within a block; "" for neither."""
    value = detail["input"]
    if not isinstance(value, str):
        return ""
    if detail["type"] == "literal_error":
        return suggestion(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    blocks = blocks_of(info.annotation) if info else []
    tag = next((tag for tag in TAGS if any(tag in block.model_fields for block in blocks)), None)
    if tag and detail["type"] in ("model_type", "model_attributes_type"):
        return f"write {field}.{tag}={value} on the command line, {field}: {{{tag}: {value}}} in the run file"
    return ""


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Returns one problem for a value of none of the types that a field takes."""
    whys: dict[tuple[str, str], list[str]] = {}
    for each in problems:
        whys.setdefault((each.field, each.fix), []).append(each.why)
    return [
        Problem(field, ", or ".join([found[0], *(_expected(why) for why in found[1:])]), fix)
        for (field, fix), found in whys.items()
    ]


def _expected(why: str) -> str:
    """Returns what a field takes, read from a problem's reason."""
    return why.partition(" given; ")[2].removeprefix("input should be ")


def _holds(path: Sequence[Any], others: Sequence[Sequence[Any]]) -> bool:
    """Returns whether one of the other paths is this one, or lies within it."""
    return any(list(other[: len(path)]) == list(path) for other in others)


def _moved(path: Sequence[Any], raw: Any) -> list[Any] | None:
    """Copies an unknown key's value to the key that was meant. None if no name is near, that key is set, or the unknown
    key has a meaning in another kind of block."""
    near = difflib.get_close_matches(str(path[-1]), siblings(path, raw), n=1)
    is_of_another = bool(owners_of(path))
    for part in path[:-1]:
        raw = raw[part]
    if not near or near[0] in raw or is_of_another:
        return None
    raw[near[0]] = raw[path[-1]]
    return [*path[:-1], near[0]]


def _in_yaml(value: Any) -> str:
    """Returns a value as a run file has it: Python would write None and True."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _nearest(key: str, names: Sequence[str]) -> str:
    last = {name.rsplit(".", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(key, names, n=1) or [
        last[match] for match in difflib.get_close_matches(key.rsplit(".", 1)[-1], list(last), n=1)
    ]
    if near:
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(sorted(set(names)))}" if len(names) <= 20 else "see drivetrain fields"


def _path_in(location: tuple[int | str, ...], raw: Any) -> list[Any]:
    """Returns pydantic's location without the names of union branches between the keys."""
    path: list[Any] = []
    node = raw
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(node, dict) and (part in node or is_last):
            path.append(part)
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(part)
            node = node[part]
        elif path and part in UNION_TAGS.get(str(path[-1]), ()):
            continue
        elif not isinstance(node, dict | list):
            break
    return path


def _remove(raw: Any, path: list[Any]) -> bool:
    """Removes the key; returns False if it was not there (a required key that is missing)."""
    for part in path[:-1]:
        if isinstance(raw, dict) and part not in raw:
            return True  # it went with what held it
        raw = raw[part]
    if not path or (isinstance(raw, dict) and path[-1] not in raw):
        return False
    if isinstance(raw, dict) or path[-1] < len(raw):  # places of a list come last first
        del raw[path[-1]]
    return True
