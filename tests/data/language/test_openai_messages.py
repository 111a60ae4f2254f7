from __future__ import annotations

import json
from typing import Any

import pytest

from drivetrain.data.language.conversation_formats import read_conversation
from drivetrain.data.language.conversations import Message
from drivetrain.data.language.row_schema import RowError, RowSchema

FORM = RowSchema("openai")
ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION = {"name": "add", "arguments": {"a": 2}}
CALLED = {"type": "function", "function": FUNCTION}
WRITTEN = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2})}}


def read(*messages: Any, form: RowSchema = FORM, **more: Any) -> list[Message]:
    return list(read_conversation({"messages": list(messages), **more}, form, "", {}).messages)


def test_roles_may_come_in_any_order() -> None:
    got = read(
        {"role": "developer", "content": "Be kind"}, ASKED, ASKED, SAID, {"role": "system", "content": "x"}, SAID
    )
    assert [each.role for each in got] == ["system", "user", "user", "assistant", "system", "assistant"]
    assert got[0] == Message("system", "Be kind")


def test_calls_of_tools_and_their_results() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [WRITTEN, {"function": FUNCTION}, FUNCTION]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": ""}
    got = read(ASKED, calling, result, {"role": "function", "name": "add", "content": "5"}, SAID)
    assert got[1] == Message("assistant", "", ({"id": "call_1", **CALLED}, CALLED, CALLED))
    assert got[2:4] == [Message("tool", "", tool_call_id="call_1"), Message("tool", "5", name="add")]
    assert read(ASKED, {**calling, "content": "Let me see"})[1].content == "Let me see"
    former = {"role": "assistant", "content": None, "function_call": WRITTEN["function"]}
    assert read(ASKED, former)[1] == Message("assistant", "", (CALLED,))


def test_names_and_reasoning_reach_the_template() -> None:
    reported = {**SAID, "reasoning_content": "They greet."}
    got = read({**ASKED, "name": "Ada"}, reported, {"role": "tool", "name": "add", "content": "5"}, SAID)
    assert [each.as_template() for each in got][:2] == [{**ASKED, "name": "Ada"}, reported]
    assert got[2].as_template() == {"role": "tool", "name": "add", "content": "5"}
    assert read({**ASKED, "name": 7}, SAID) == read(ASKED, SAID)
    with pytest.raises(RowError, match="reasoning_content of message 2 is a number"):
        read(ASKED, {**SAID, "reasoning_content": 3})


def test_functions_as_openai_named_tools_at_first_are_read() -> None:
    function = {"name": "add", "parameters": {}}
    row = {"messages": [ASKED, SAID], "functions": [function]}
    for form in (FORM, RowSchema("openai", by_usual_names=True), RowSchema("openai", {"messages": "messages"})):
        for nothing in ({}, {"tools": None}, {"tools": "[]"}):
            found = read_conversation({**row, **nothing}, form, "", {}).tools
            assert found == ({"type": "function", "function": function},)


def test_absent_fields_may_be_null_as_parquet_has_them() -> None:
    empty = {"tool_calls": None, "function_call": None, "weight": None, "name": None}
    assert read({**ASKED, **empty}, {**SAID, **empty}) == read(ASKED, {**SAID, "tool_calls": []}) == read(ASKED, SAID)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read(ASKED, {"role": "assistant", "content": parts}) == read(ASKED, SAID)


def test_an_assistants_message_of_weight_0_is_not_trained_on() -> None:
    got = read(ASKED, {**SAID, "weight": 0}, {**ASKED, "weight": 0}, {**SAID, "weight": 1}, ASKED, SAID)
    assert [each.trained for each in got] == [True, False, True, True, True, True]
    calling = {"role": "assistant", "content": None, "weight": 0, "tool_calls": [WRITTEN]}
    assert not read(ASKED, calling, SAID)[1].trained


def test_tools_stand_beside_the_messages() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for form in (FORM, RowSchema("openai", {"messages": "messages"})):
        for tools in ([tool], json.dumps([tool])):
            row = {"messages": [ASKED, SAID], "tools": tools}
            assert read_conversation(row, form, "", {}).tools == (tool,)


def test_columns_and_tags_are_renamed() -> None:
    tags = {"role_tag": "who", "content_tag": "what", "assistant_tag": "robot", "function_tag": "function"}
    words = [("user", "a"), ("function", json.dumps(FUNCTION)), ("tool", "5"), ("robot", "b")]
    row = {"talk": [{"who": role, "what": content} for role, content in words]}
    got = read_conversation(row, RowSchema("openai", {"messages": "talk"}, tags), "", {}).messages
    assert got[1:] == (Message("assistant", "", (CALLED,)), Message("tool", "5"), Message("assistant", "b"))


def test_of_preferences_the_chosen_answer_is_the_reply() -> None:
    form = RowSchema("openai", ranking=True)
    for chosen in ("Hello", SAID):
        assert read(ASKED, form=form, chosen=chosen) == read(ASKED, SAID)
    with pytest.raises(RowError, match="a reply stands before the chosen one already"):
        read(ASKED, SAID, form=form, chosen="Hello again")
    with pytest.raises(RowError, match="chosen is a list, not a text"):
        read(ASKED, form=form, chosen=[SAID])


PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
BAD = {
    "no content": ([ASKED, {"role": "assistant", "content": None}], "message 2 has no 'content'"),
    "no role": ([{"content": "x"}], "message 1 has no 'role'; it has: content"),
    "unknown role": ([{"role": "bot", "content": "x"}], "message 1 has the unknown role 'bot'"),
    "a picture": (
        [{"role": "user", "content": [PICTURE]}, SAID],
        r"message 1 has a part that is no text (image_url): only texts are read",
    ),
    "a bare part": (
        [{"role": "user", "content": ["x"]}, SAID],
        "message 1 has a part that is a text, no mapping of type and text",
    ),
    "reasoning as a part": (
        [ASKED, {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}]}],
        "message 2 has a part of type reasoning: write it as the message's reasoning_content",
    ),
    "a call as a part": (
        [ASKED, {"role": "assistant", "content": [{"type": "tool_call", "value": "{}"}]}],
        "message 2 has a part of type tool_call: write it as the message's tool_calls",
    ),
    "half a loss weight": ([ASKED, {**SAID, "loss_weight": 0.5}], "message 2 has loss_weight 0.5, which may be 0 or 1"),
    "no parts": ([{"role": "user", "content": []}, SAID], "message 1 is empty"),
    "a number": ([ASKED, {"role": "assistant", "content": 5}], "message 2 is a number, not a text"),
    "a number beside calls": ([ASKED, {**SAID, "content": 5, "tool_calls": [WRITTEN]}], "message 2 is a number"),
    "a weight between": ([ASKED, {**SAID, "weight": 0.5}], "message 2 has weight 0.5, which may be 0 or 1"),
    "no weight at all": ([ASKED, {**SAID, "weight": 0}], "every assistant's message has weight 0"),
    "calls that are no list": ([ASKED, {**SAID, "tool_calls": {}}], "tool_calls of message 2 is an object, not a list"),
    "a call that is a text": ([ASKED, {**SAID, "tool_calls": ["add"]}], "message 2 calls a text"),
    "broken arguments": (
        [ASKED, {**SAID, "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}],
        "arguments of add in message 2 is broken JSON",
    ),
    "no reply": ([ASKED], "no message is the assistant's"),
    "no reply at the end": ([ASKED, SAID, {"role": "tool", "content": "x"}], "it ends with a message of the tool"),
}


@pytest.mark.parametrize(("messages", "why"), BAD.values(), ids=BAD)
def test_messages_that_cannot_serve_say_why(messages: list[Any], why: str) -> None:
    with pytest.raises(RowError) as caught:
        read(*messages)
    assert str(caught.value).startswith(why)


def test_a_tools_message_says_which_call_it_answers() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    listed = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    found = [
        each.as_template() for each in read_conversation({"messages": listed}, RowSchema("openai"), "row", {}).messages
    ]
    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"] == "call_1"
    assert "tool_call_id" not in found[3]
