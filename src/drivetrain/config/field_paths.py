"""All fields of a run file, by path and by the kind of block that has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from drivetrain.config.run import RunConfig

TAGS = ("type", "name")  # fields that tell which of several blocks is meant


def field_paths(model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """Yields every field of the run file as (path, pydantic FieldInfo), blocks before the fields within."""
    for _, path, info in owned_fields(model, prefix):
        yield path, info


def owned_fields(
    model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = (), owner: str = ""
) -> Iterator[tuple[str, list[str], Any]]:
    """Yields the fields with the name of the block's kind in a run file: a workload's type, an engine's name."""
    for name, info in model.model_fields.items():
        yield owner, [*prefix, name], info
        blocks = blocks_of(info.annotation)
        for block in blocks:
            own = tag_of(block) if len(blocks) > 1 else None
            yield from owned_fields(block, (*prefix, name), own or owner)


def blocks_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the blocks among the types that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in blocks_of(argument)]


def tag_of(block: type[BaseModel]) -> str | None:
    """Returns the name by which a run file chooses the block."""
    for key in TAGS:
        if found := choices(block, key):
            return str(found[0])
    return None


def choices(block: type[BaseModel], key: str) -> tuple[Any, ...]:
    """Returns the texts that the field `key` of a block takes; () where it takes other values or does not exist."""
    field = block.model_fields.get(key)
    return () if field is None else tuple(each for each in get_args(field.annotation) if isinstance(each, str))
