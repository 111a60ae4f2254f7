"""Schemas of calls that a reply has to be."""

from __future__ import annotations

import json
from typing import Any

import torch

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.generation.constraints import Constraints
from drivetrain.inference.serve.messages import offered

END, SIZE = 256, 257


def town(of: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": {"type": of}}, "required": ["name"]}


FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Town"}},
        "required": ["at"],
        "$defs": {"Town": town("string")},
    },
    "census": {
        "type": "object",
        "properties": {"at": {"$ref": "#/definitions/Town"}},
        "required": ["at"],
        "definitions": {"Town": town("integer")},
    },
    "plant": {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#"}}}},
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]


def fits(schema: dict[str, Any], reply: str) -> bool:
    """Returns whether a model under this constraint may write the reply."""
    constraint = Constraints(byte_tokenizer(["<|end|>"]), frozenset({END}), SIZE).started(schema)
    for byte in reply.encode():
        scores = torch.zeros(SIZE)
        constraint.forbid(scores)
        if scores[byte] < 0:
            return False
        constraint.accept(byte)
    return True


def test_the_references_of_a_forced_function_lead_to_its_own_definitions() -> None:
    calls: list[tuple[str, Any, bool]] = [
        ("weather", {"at": {"name": "Rom"}}, True),
        ("weather", {"at": {"name": 3}}, False),
        ("census", {"at": {"name": 3}}, True),
        ("census", {"at": {"name": "Rom"}}, False),
        ("plant", {"below": [{"below": []}]}, True),
        ("plant", {"below": [3]}, False),
    ]
    for choice in ("required", None):
        for name, arguments, is_valid in calls:
            _, schema = offered(TOOLS, choice or {"type": "function", "function": {"name": name}})
            assert schema is not None
            assert fits(schema, json.dumps({"name": name, "arguments": arguments})) == is_valid, (name, arguments)
