"""The Responses API, asked by OpenAI's own client, which builds what a stream says and gives it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.running_server import Running, serving
from tests.scripted_model import scripted

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Rom"}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as found:
        yield found


def test_a_text_is_answered_under_its_instructions(server: Running) -> None:
    found = server.client().responses.create(
        model="scripted", input="Hi", instructions="Be kind.", extra_body={"seed": 4}
    )
    assert found.output_text == "answer 4 0."
    assert (found.status, found.store, found.usage.output_tokens) == ("completed", False, len("answer 4 0."))
    prompt = server.model.tokenizer.decode(list(server.model.generator.requests[-1].ids))
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_a_cut_answer_is_incomplete(server: Running) -> None:
    found = server.client().responses.create(model="scripted", input="Hi", max_output_tokens=3)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("reply", "kinds"),
    [
        ("Hello.", ["message"]),
        ("", ["message"]),
        ("<think>\nhm\n</think>\n\nHello.", ["reasoning", "message"]),
        (f"See.\n{CALL}\n{CALL}\nDone.", ["message", "function_call", "function_call", "message"]),
    ],
)
def test_a_stream_builds_the_response_that_is_sent_whole(reply: str, kinds: list[str]) -> None:
    def items(output: Any) -> list[Any]:
        left = {"id", "call_id", "parsed_arguments"}
        return [{key: value for key, value in each.model_dump().items() if key not in left} for each in output]

    with (
        serving(scripted(lambda _: reply)) as server,
        server.client().responses.stream(model="scripted", input="Hi", tools=[TOOL]) as stream,
    ):
        events = list(stream)
        built = stream.get_final_response()
        whole = server.client().responses.create(model="scripted", input="Hi", tools=[TOOL])
    assert [each.type for each in built.output] == kinds
    assert [each.sequence_number for each in events if hasattr(each, "sequence_number")][:3] == [0, 1, 2]
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == built.output_text
    own = [each for each in items(built.output) if each["type"] != "message"]
    assert own == [each for each in items(whole.output) if each["type"] != "message"]
    assert whole.output_text == built.output_text
    assert len({each.id for each in built.output}) == len(kinds)


def test_calls_and_their_results_go_back_into_the_conversation(server: Running) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"town": "Rom"}'},
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
    ]
    server.client().responses.create(model="scripted", input=items, tools=[TOOL])
    prompt = server.model.tokenizer.decode(list(server.model.generator.requests[-1].ids))
    assert '<tool_call>{"name": "weather", "arguments": {"town": "Rom"}}</tool_call>' in prompt
    assert "<tool_response>\nwarm\n</tool_response>" in prompt


def test_a_schema_constrains_the_answer(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    server.client().responses.create(model="scripted", input="Hi", text=text)
    assert server.model.generator.requests[-1].constraint == schema


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"format": "json_object"}, "text.format is an object, and 'json_object' was given"),
        ({"format": {"type": "xml"}}, "text.format.type: 'xml' was given"),
        ({"verbosity": "low"}, "text.verbosity='low' is not supported"),
    ],
)
def test_a_form_that_is_none_and_a_verbosity_are_refused_by_name(server: Running, text: Any, why: str) -> None:
    status, _, found = server.ask("/v1/responses", {"input": "Hi", "text": text})
    assert status == 400
    assert why in found["error"]["message"]
    assert server.ask("/v1/responses", {"input": "Hi", "text": {"verbosity": "medium"}})[0] == 200


@pytest.mark.parametrize(
    "given", [{"store": True}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"background": True}]
)
def test_what_would_be_stored_is_refused_by_name(server: Running, given: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"{next(iter(given))}=.* is not supported: .*stored"):
        server.client().responses.create(model="scripted", input="Hi", **given)
    with pytest.raises(openai.NotFoundError, match="none are stored here"):
        server.client().responses.retrieve("resp_1")


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([{"type": "input_image"}], "is of type 'input_image'"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "part of type 'input_file'"),
        ([{"role": "pirate", "content": "a"}], "unknown role 'pirate'"),
        ([{}], "has no 'role'"),
        ([{"type": "function_call"}], "has no name"),
    ],
)
def test_items_of_other_kinds_are_refused(server: Running, items: Any, why: str) -> None:
    status, _, found = server.ask("/v1/responses", {"input": items})
    assert status == 400
    assert why in json.loads(json.dumps(found))["error"]["message"]
