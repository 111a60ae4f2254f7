"""The base of every block of the run file, and the one-line documentation each field carries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from drivetrain.config.files import no_path, no_text
from drivetrain.config.location import why_not_readable


def _named(given: str) -> str:
    why = no_path(given) or why_not_readable(given)
    if why is not None:
        raise ValueError(f"input should be a path, an address in a store or a hub id; {why}")
    return given


PathOrId = Annotated[str, AfterValidator(_named)]
MaybeEmpty = Annotated[str, Field(min_length=0)]  # a text that means something with nothing in it


class Frozen(BaseModel):
    """A block of the run file: immutable, closed to keys it does not know, and of the types it names.

    Nothing is converted but what YAML and JSON have no other way to write: a text stands for a path, a list for a
    tuple, 1e3 for a whole number. null gives a field its default back.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",  # infinities in free-form blocks, which pydantic writes as null by default
        strict=True,
        str_min_length=1,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _as_it_can_be_written(cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(given, dict):
            return handler(given)
        taken, wrong = {}, []
        for key, value in given.items():
            if value is None and cls._goes_back(key):
                continue
            try:
                taken[key] = _converted(value, _kinds(cls, key), info.mode == "python")
            except ValueError as error:
                why = PydanticCustomError("value_error", "{why}", {"why": str(error)})
                wrong.append(InitErrorDetails(type=why, loc=(str(key),), input=value))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return handler(taken)

    @classmethod
    def _goes_back(cls, key: Any) -> bool:
        """Returns whether null stands for the field's default: the field has one, and null is not a value of it."""
        field = cls.model_fields.get(key)
        return field is not None and not field.is_required() and type(None) not in _kinds(cls, key)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, of_field in schema.get("properties", {}).items():
            if cls._goes_back(name):
                schema["properties"][name] = _or_null(of_field)
        return schema


class JsonSchemaMadeLate:
    """Like pydantic's WithJsonSchema, but made when a JSON Schema is requested: a schema of other blocks takes tens of
    milliseconds, which every start would pay."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del core_schema, handler
        return self._make()


def decides_memory(schema: dict[str, Any]) -> None:
    """Marks a field of the run that decides how much memory a sample takes, or how many samples there are. It leaves
    the JSON Schema as it is."""
    del schema


def doc(description: str, default: Any = ..., **constraints: Any) -> Any:
    """Returns a field with its one line of documentation; `constraints` are pydantic's (`gt`, `ge`, `le`, ...)."""
    return Field(default, description=description, **constraints)


def _converted(given: Any, kinds: frozenset[type], in_python: bool) -> Any:
    """Returns a value as its field takes it. Raises ValueError for a text that stands for none, and for true where
    pydantic would read 1.

    in_python: the value does not come from JSON, where pydantic itself turns texts into paths.
    """
    if isinstance(given, str):
        is_path = Path in kinds and str not in kinds
        why = no_path(given) if is_path else no_text(given)
        if why is not None:
            raise ValueError(f"input should be a {'path' if is_path else 'text'}; {why}")
        if is_path and in_python:
            return Path(given)
    elif isinstance(given, bool) and bool not in kinds and int in kinds:
        raise ValueError("input should be a number")
    elif isinstance(given, float) and given.is_integer() and int in kinds and float not in kinds:
        return int(given)
    return tuple(given) if isinstance(given, list) and tuple in kinds else given


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a field that also takes null."""
    if "enum" in schema:
        return {key: value for key, value in schema.items() if key != "type"} | {"enum": [*schema["enum"], None]}
    documentation: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return {"anyOf": [{k: v for k, v in schema.items() if k not in documentation}, {"type": "null"}], **documentation}


@functools.cache
def _kinds(block: type[Frozen], key: Any) -> frozenset[type]:
    """Returns the types that a field's value may have; none for an unknown key."""
    field = block.model_fields.get(key)
    return frozenset() if field is None else frozenset(_types(field.annotation))


def _types(annotation: Any) -> Iterator[type]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin is Annotated:
        yield from _types(get_args(annotation)[0])
    elif isinstance(origin, type) and origin.__module__ != "types":
        yield origin  # list, tuple, dict
    elif origin is not None:
        for each in get_args(annotation):
            yield from _types(each)
    else:
        yield annotation
