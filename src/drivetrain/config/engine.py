"""Engines: how a run is spread over devices. One block a kind, told apart by `name`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from drivetrain.config.base import Frozen, doc


class SingleEngine(Frozen):
    name: Literal["single"] = doc("One process on one device", "single")


def _block(given: Any) -> Any:
    """`engine: single` is short for `engine: {name: single}`."""
    return {"name": given} if isinstance(given, str) else given


EngineConfig = Annotated[
    SingleEngine,
    BeforeValidator(_block),
    WithJsonSchema({"anyOf": [{"enum": ["single"]}, SingleEngine.model_json_schema()]}),
]
