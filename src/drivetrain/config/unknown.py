"""What was meant by a key that a run file does not have where it stands."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem

# what other trainers call it: what it is called here
OTHER_NAMES = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "gradient_clipping": "max_grad_norm",
    "lr_scheduler_type": "schedule",
    "per_device_train_batch_size": "micro_batch_size",
    "cutoff_len": "length",
    "max_seq_length": "length",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_target": "targets",
    "lora_dropout": "dropout",
}
TAGS = ("type", "name")  # fields that tell which of several blocks is meant


def unknown(field: str, path: Sequence[Any], raw: Any) -> Problem:
    """Return the problem of a key that is not known there: a name that is near, the block that has it, or its place."""
    blocks, name = blocks_at(path[:-1], raw), str(path[-1])
    known = [key for block in blocks for key in block.model_fields]
    elsewhere = {other: key for other, key in OTHER_NAMES.items() if key in known}
    if near := difflib.get_close_matches(name, [*known, *elsewhere], n=1):
        return Problem(field, "there is no such key", f"did you mean {elsewhere.get(near[0], near[0])}?")
    if owners := _owners(path):
        own = _given_tag(raw, path[0])
        return Problem(field, f"{own} has no such key: it is of {' and '.join(owners)}", "leave it out")
    if name in RunConfig.model_fields:
        fix = f"write {name} at the top of the run file (on the command line {name}=...)"
        return Problem(field, f"there is no such key here, but {name} is a key of its own", fix)
    fix = f"known here: {', '.join(sorted(set(known)))}" if 0 < len(known) <= 20 else "see drivetrain fields"
    return Problem(field, "there is no such key", fix)


def siblings(path: Sequence[Any], raw: Any) -> list[str]:
    """Names of the fields that may stand in the place of this path's last key."""
    return [key for block in blocks_at(path[:-1], raw) for key in block.model_fields]


def blocks_at(path: Sequence[Any], raw: Any) -> list[type[BaseModel]]:
    """Return the kinds of block that a path of a run file leads to: one, where the file itself says which."""
    blocks: list[type[BaseModel]] = [RunConfig]
    for part in path:
        raw = raw.get(part) if isinstance(raw, dict) else raw[part] if _has(raw, part) else None
        if isinstance(part, int):  # a place in a list of blocks
            continue
        infos = [block.model_fields[part] for block in blocks if part in block.model_fields]
        blocks = [below for info in infos for below in blocks_of(info.annotation)]
        tagged = [block for block in blocks if isinstance(raw, dict) and _is_tagged(block, raw)]
        blocks = tagged or blocks
    return blocks


def blocks_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the blocks among the kinds that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in blocks_of(argument)]


def _owners(path: Sequence[Any]) -> list[str]:
    """Return the kinds of workload or engine that have this key at this place."""
    if not path or path[0] not in RunConfig.model_fields:
        return []
    found = []
    for block in blocks_of(RunConfig.model_fields[path[0]].annotation):
        below = [block]
        for part in path[1:-1]:
            fields = [each.model_fields[part] for each in below if part in each.model_fields]
            below = [each for field in fields for each in blocks_of(field.annotation)]
        if any(str(path[-1]) in each.model_fields for each in below) and (tag := tag_of(block)):
            found.append(tag)
    return found


def tag_of(block: type[BaseModel]) -> str | None:
    """Return the name by which a run file chooses the block."""
    for key in TAGS:
        choices = _choices(block, key)
        if choices:
            return str(choices[0])
    return None


def _given_tag(raw: Any, key: Any) -> str:
    """Return what a run file calls the kind of its workload or engine."""
    block = raw.get(key) if isinstance(raw, dict) else None
    return next((str(block[tag]) for tag in TAGS if tag in block), str(key)) if isinstance(block, dict) else str(key)


def _is_tagged(block: type[BaseModel], raw: dict[str, Any]) -> bool:
    return any(key in raw and raw[key] in _choices(block, key) for key in TAGS)


def _choices(block: type[BaseModel], key: str) -> tuple[Any, ...]:
    field = block.model_fields.get(key)
    return () if field is None else tuple(each for each in get_args(field.annotation) if isinstance(each, str))


def _has(raw: Any, place: Any) -> bool:
    return isinstance(raw, list) and isinstance(place, int) and place < len(raw)
