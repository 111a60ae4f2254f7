"""Every field of a run file, by its path and by the kind of block that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from drivetrain.config.run import RunConfig

TAGS = ("type", "name")  # fields that tell which of several blocks is meant


def field_paths(model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """Every field of the run file as (path, pydantic FieldInfo), blocks before what they hold."""
    for _, path, info in owned_fields(model, prefix):
        yield path, info


def owned_fields(
    model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = (), owner: str = ""
) -> Iterator[tuple[str, list[str], Any]]:
    """The same with what a run file calls the kind of block that has the field: a workload's type, an engine's name."""
    for name, info in model.model_fields.items():
        yield owner, [*prefix, name], info
        blocks = blocks_of(info.annotation)
        for block in blocks:
            own = tag_of(block) if len(blocks) > 1 else None
            yield from owned_fields(block, (*prefix, name), own or owner)


def blocks_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the blocks among the kinds that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in blocks_of(argument)]


def tag_of(block: type[BaseModel]) -> str | None:
    """Return the name by which a run file chooses the block."""
    for key in TAGS:
        if found := choices(block, key):
            return str(found[0])
    return None


def choices(block: type[BaseModel], key: str) -> tuple[Any, ...]:
    """Return the texts that the field `key` of a block takes; () where it takes others or is not there."""
    field = block.model_fields.get(key)
    return () if field is None else tuple(each for each in get_args(field.annotation) if isinstance(each, str))
