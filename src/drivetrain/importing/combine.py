"""Combines the files, the run file below them, and the other software's defaults into one run file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from drivetrain.config.field_paths import field_paths
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.config.translation import Note
from drivetrain.errors import Problem
from drivetrain.importing.merge import Joined, alternatives
from drivetrain.importing.write import in_yaml

# a block that the files speak of is theirs as a whole: half a model or optimizer of each would be neither
WHOLE = ("workload", "engine", "optimizer", "schedule", "adapter", "quantised_base")
OF_MODEL = ("adapter", "quantised_base")  # of the model that the workload names
BATCH = ("batch_size", "batch_size_per_device")


def combined(joined: Joined, onto: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """Returns the run file, in the order of its fields, and a note for each default that was written out."""
    raw = _without_what_they_say(onto, joined)
    for name, value in joined.settings.items():
        _put(raw, name, value)
    theirs = {block for block in WHOLE if raw.get(block) == onto.get(block) is not None}
    notes = []
    for name, default in joined.defaults.items():
        if name.split(".")[0] in theirs or any(_has(raw, other) for other in alternatives(name)):
            continue
        _put(raw, name, default.value)
        why = f"{name}: {in_yaml(default.value)}; not given: the source's default"
        notes.append(Note(default.key, "mapped", why, name, default.value))
    engine = raw.get("engine")
    if isinstance(engine, dict) and engine.keys() == {"name"}:
        raw["engine"] = engine["name"]
    return _ordered(raw), notes


def _without_what_they_say(onto: Mapping[str, Any], joined: Joined) -> dict[str, Any]:
    raw = copy.deepcopy(dict(onto))
    for block in WHOLE:
        blocks = (block, "workload") if block in OF_MODEL else (block,)
        if any(name.split(".")[0] in blocks for name in joined.settings):
            raw.pop(block, None)
    for name in joined.settings:
        for other in alternatives(name):
            _take_out(raw, other)
    if any(name in joined.settings for name in BATCH):
        raw.pop("micro_batch_size", None)
    return raw


def _ordered(raw: dict[str, Any]) -> dict[str, Any]:
    """Orders keys like the fields; keys of the user's choice stay in their order."""
    order = {".".join(path): place for place, (path, _) in enumerate(field_paths())}
    order["workload.type"] = -1  # the first of any workload

    def sorted_block(block: dict[str, Any], prefix: str) -> dict[str, Any]:
        known = [name for name in block if prefix + name in order]
        if len(known) < len(block):
            return block
        names = sorted(block, key=lambda name: order[prefix + name])
        return {
            name: sorted_block(block[name], f"{prefix}{name}.") if isinstance(block[name], dict) else block[name]
            for name in names
        }

    return sorted_block(raw, "")


Verdict = tuple[RunConfig | None, list[Problem], list[str]]


def judged(raw: Mapping[str, Any], joined: Joined, onto: str | None) -> Verdict:
    """Returns the run (None if something is missing), its problems, named by the file they come from, and the missing
    fields."""
    run, found = validate(copy.deepcopy(dict(raw)), [])
    absent = [name for name in ("workload", "loop") if name not in raw]
    problems = [_named(problem, joined, onto) for problem in found if problem.field not in absent]
    missing = [name for name in ("workload",) if name in absent]
    if not any(raw.get(name) is not None for name in BATCH):
        missing.append("batch_size")
    if not any(_has(raw, name) for name in ("loop.steps", "loop.epochs")):
        missing.append("loop")
    return (None if missing else run), problems, missing


def _named(problem: Problem, joined: Joined, onto: str | None) -> Problem:
    """Names the file and the key that a problem comes from."""
    name = next((name for name in joined.settings if _covers(name, problem.field)), None)
    if name is None:
        return Problem(f"{onto}: {problem.field}" if onto else problem.field, problem.why, problem.fix)
    found = joined.by[name]
    key = found.key_of(name) or problem.field
    return Problem(f"{found.source.label}: {key} ({problem.field})", problem.why, problem.fix)


def _covers(name: str, field: str) -> bool:
    return name == field or field.startswith(f"{name}.") or name.startswith(f"{field}.")


# --- dotted names ----------------------------------------------------------------------------------------------------


def _put(raw: dict[str, Any], name: str, value: Any) -> None:
    *blocks, last = name.split(".")
    for block in blocks:
        below = raw.get(block)
        raw[block] = raw = below if isinstance(below, dict) else {}
    raw[last] = value


def _has(raw: Mapping[str, Any], name: str) -> bool:
    node: Any = raw
    for part in name.split("."):
        if not isinstance(node, dict) or node.get(part) is None:
            return False
        node = node[part]
    return True


def _take_out(raw: dict[str, Any], name: str) -> None:
    *blocks, last = name.split(".")
    node: Any = raw
    for block in blocks:
        node = node.get(block) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)
