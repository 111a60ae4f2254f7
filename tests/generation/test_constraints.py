"""Forms of answers: schemas made to take for ever, and models that would write white space for ever."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch

from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.generation.constraints import MOST_CHARACTERS, MOST_MEMBERS, MOST_PROPERTIES, Constraints
from tests.kept_memory import kept_bytes

END, SIZE = 256, 257


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(byte_tokenizer(["<|end|>"]), frozenset({END}), SIZE)


def written(constraints: Constraints, form: Any, liked: bytes, most: int = 400) -> tuple[str, bool]:
    """Returns what a model writes that always wants these bytes, the first most, and whether it came to an end."""
    constraint, text = constraints.started(form), b""
    for _ in range(most):
        scores = torch.linspace(0, -1, SIZE)
        for place, byte in enumerate(liked):
            scores[byte] = 10.0 - place
        constraint.forbid(scores)
        token = int(scores.argmax())
        if token == END:
            return text.decode(), True
        constraint.accept(token)
        text += bytes([token])
        if constraint.is_complete:
            return text.decode(), True
    return text.decode(), False


def test_a_model_that_wants_white_space_for_ever_comes_to_an_end(constraints: Constraints) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for liked in (b" ", b"\n", b" \n\t\r"):
        text, ended = written(constraints, schema, liked)
        assert ended, text
        assert json.loads(text).keys() == {"a", "b"}
        assert max(map(len, re.findall(r"\s+", text))) <= 12


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def fan(depth: int, kind: str) -> dict[str, Any]:
    """Each level names the next twice: two to the power of `depth` where references are copied."""
    two = [[{"$ref": f"#/$defs/a{level + 1}"}] * 2 for level in range(depth)]
    levels: dict[str, Any] = {f"a{level}": {kind: each} for level, each in enumerate(two)}
    return {"$defs": {**levels, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


BOMBS: dict[str, Any] = {
    "nested": nested(60),
    "anyOf twice": fan(24, "anyOf"),
    "allOf twice": fan(24, "allOf"),
    "itself": {"$ref": "#"},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "long text": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "long list": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    "repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "states": {"type": "string", "pattern": "^(a|b)*a(a|b){25}$"},
    "remote": {"$ref": "http://127.0.0.1:9/schema.json"},
    "digits": {"type": "integer", "maximum": 10**300},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_made_to_take_for_ever_is_followed_or_refused_soon(constraints: Constraints, name: str) -> None:
    start, refused = time.process_time(), None
    try:
        written(constraints, BOMBS[name], b"a1", 40)
    except UserError as error:
        refused = str(error)
    assert refused is None or "cannot be followed" in refused
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"type": "object", "properties": {f"p{n}": {} for n in range(8000)}},
            f"8,000 keys, more than {MOST_PROPERTIES}",
        ),
        ({"enum": list(range(MOST_MEMBERS + 1))}, "more than 5,000 members"),
        ({"anyOf": [{"properties": {f"p{n}": True for n in range(400)}}] * 20}, "more than 5,000 members"),
        ({"pattern": f"^({'|'.join('a' * n + 'b' for n in range(2000))})$"}, "more than 200,000 characters"),
        ({"properties": {"x" * (MOST_CHARACTERS + 1): {}}}, "more than 200,000 characters"),
        ("a" * (MOST_CHARACTERS + 1), "more than 200,000 characters"),
    ],
)
def test_a_schema_that_would_take_minutes_is_refused(constraints: Constraints, schema: Any, told: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match=told):
        constraints.started(schema)
    assert time.process_time() - start < 1


def test_no_form_is_remembered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance keeps 700 bytes of each new schema beside the vocabulary."""
    monkeypatch.setattr("drivetrain.generation.constraints.RENEWED", 50)
    constraints = Constraints(byte_tokenizer(["<|end|>"]), frozenset({END}), SIZE)

    def follow(first: int) -> None:
        for number in range(first, first + 200):
            schema = {"type": "object", "properties": {f"a{number}": {"type": "null"}}, "required": [f"a{number}"]}
            written(constraints, {**schema, "additionalProperties": False}, b"n", 30)

    follow(0)
    assert kept_bytes(lambda: follow(200)) < 70_000  # 190 kB where they are kept


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"not": {}}])
def test_a_schema_that_nothing_fulfils_is_refused_before_an_answer_begins(
    constraints: Constraints, schema: Any
) -> None:
    with pytest.raises(UserError, match="cannot be followed"):
        constraints.started(schema)
