"""The run file as the fields of a form: each with its documentation, default, choices and the block it belongs to."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from drivetrain.config.field_paths import TAGS, blocks_of, choices, tag_of
from drivetrain.config.optimizers import KINDS
from drivetrain.config.run import RunConfig
from drivetrain.config.training import SCHEDULES
from drivetrain.runtime.strict_json import plain

COMMON = {  # shown first
    *("name", "workload.type", "workload.stage", "workload.model.path", "workload.model.tokenizer"),
    *("workload.data.source", "workload.data.train", "workload.data.evaluation", "workload.data.text_column"),
    *("workload.data.label_column", "workload.data.template", "workload.data.registry", "workload.data.length"),
    *("workload.data.max_length", "workload.data.image_size", "workload.preference.loss", "workload.preference.beta"),
    *("adapter", "adapter.method", "adapter.rank", "quantised_base", "quantised_base.format"),
    *("precision", "engine", "processes", "device", "batch_size", "loop.epochs", "loop.steps"),
    *("optimizer.name", "optimizer.lr", "schedule.name", "schedule.warmup_ratio"),
    *("evaluation.every_epochs", "evaluation.every_steps", "checkpoints.every_steps", "seed"),
}
SHORT_FORMS = {
    "workload.data.train",
    "workload.data.evaluation",
    "workload.preference.loss",
}  # a text may stand for all
UNUSED = {"objects"}  # kinds of workloads that a file cannot describe
RANGES = {"minimum": "minimum", "maximum": "maximum", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
WORDS = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "list", "object": "mapping"}
SUGGESTED = {"optimizer.name": [*KINDS], "schedule.name": [*SCHEDULES]}
When = tuple[tuple[str, tuple[str, ...]], ...]


@functools.cache
def form() -> dict[str, Any]:
    """Returns all fields and their groups. What is null, false or empty in a field is left out."""
    groups = [{"name": name, "title": info.description or ""} for name, info in RunConfig.model_fields.items()]
    return {"fields": [_slim(each) for each in _fields(RunConfig, (), ())], "groups": groups}


def _slim(field: dict[str, Any]) -> dict[str, Any]:
    """Returns a field without what says nothing: half of the bytes."""
    return {key: value for key, value in field.items() if not (value is None or value is False or value in ([], ""))}


def _fields(model: type[BaseModel], prefix: tuple[str, ...], when: When) -> Iterator[dict[str, Any]]:
    schema = model.model_json_schema()
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        dotted = ".".join(path)
        if dotted == "output" or (when and when[-1][0] == dotted):
            continue  # the board's own; the kind of a block, which stands before its kinds
        blocks = [block for block in blocks_of(info.annotation) if tag_of(block) not in UNUSED]
        field = {
            "path": dotted,
            "group": path[0],
            "doc": info.description or "",
            "required": info.is_required(),
            "common": dotted in COMMON,
            "present": isinstance(info.default, BaseModel),
            "many": _is_list(info.annotation),
            "when": [{"path": each, "is": list(names)} for each, names in when],
            **_typed(info, schema["properties"].get(name, {}), schema.get("$defs", {}), blocks),
            **({"type": "text"} if dotted in SHORT_FORMS else {}),
            "suggestions": SUGGESTED.get(dotted),
        }
        yield field
        key = _tag_key(blocks)
        if key is not None:
            yield _of_kinds(field, f"{dotted}.{key}", key, blocks)
        for block in [] if field["type"] == "text" else blocks:
            own = () if key is None else ((f"{dotted}.{key}", tuple(map(str, choices(block, key)))),)
            yield from _fields(block, path, (*when, *own))


def _tag_key(blocks: Sequence[type[BaseModel]]) -> str | None:
    """Returns the field by which a run file chooses among several kinds of a block."""
    return None if len(blocks) < 2 else next((key for key in TAGS if all(choices(each, key) for each in blocks)), None)


def _of_kinds(field: dict[str, Any], dotted: str, key: str, blocks: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Returns the field that chooses among kinds."""
    named = [str(name) for block in blocks for name in choices(block, key)]
    own = {"path": dotted, "type": "choice", "choices": named, "tag": True, "common": dotted in COMMON}
    return {**field, **own, "many": False, "present": False, "suggestions": None, "default": None}


def _typed(
    info: Any, schema: dict[str, Any], definitions: dict[str, Any], blocks: Sequence[type[BaseModel]]
) -> dict[str, Any]:
    """Returns type, choices, range and default."""
    parts = list(_alternatives(schema, definitions))
    named = [value for part in parts for value in part.get("enum", [part["const"]] if "const" in part else [])]
    kinds = {str(part.get("type")) for part in parts if "enum" not in part and "const" not in part}
    named = [*dict.fromkeys([*named, *(True, False)])] if named and "boolean" in kinds else named
    found: dict[str, Any] = {
        "type": _type(kinds - {"null"}, [each for each in named if each is not None], bool(blocks)),
        "nullable": "null" in kinds or None in named,
        "choices": [each for each in named if each is not None] or None,
    }
    for part in parts:
        found |= {to: part[key] for key, to in RANGES.items() if key in part}
    return {**found, "default": None if info.is_required() else _default(info)}


def _type(kinds: set[str], named: Sequence[Any], has_blocks: bool) -> str:
    """Returns the word for a field's types: a choice may stand beside a number ("any"), a text beside a list."""
    if named:
        return "choice" if not kinds - {"object", "boolean", "string"} else "any"
    if has_blocks:
        return "block"
    if "string" in kinds:
        return "text"
    if kinds == {"integer", "number"}:
        return "number"
    return WORDS.get(next(iter(kinds)), "any") if len(kinds) == 1 else "any"


def _alternatives(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas among which a value may choose."""
    if "$ref" in schema:
        yield from _alternatives(definitions.get(schema["$ref"].rsplit("/", 1)[-1], {}), definitions)
        return
    several = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if several is None:
        yield schema
        return
    for each in several:
        yield from _alternatives(each, definitions)


def _default(info: Any) -> Any:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return None  # its own fields have theirs
    return plain({"value": _jsonable(value)})["value"]


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_jsonable(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _jsonable(each) for key, each in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_list(annotation: Any) -> bool:
    """Returns whether a field takes a list of blocks."""
    is_own = get_origin(annotation) in (list, tuple)
    return (is_own and bool(blocks_of(annotation))) or any(_is_list(each) for each in get_args(annotation))
