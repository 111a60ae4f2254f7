from __future__ import annotations

import json
from typing import Any

import pytest

from drivetrain.data.language.conversation_formats import read_conversation
from drivetrain.data.language.conversations import Message
from drivetrain.data.language.row_schema import RowError, RowSchema

FORM = RowSchema("sharegpt")
ASKED, SAID = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
CALL = {"name": "add", "arguments": {"a": 2}}
CALLED = {"type": "function", "function": CALL}


def read(*messages: Any, form: RowSchema = FORM, **more: Any) -> list[Message]:
    return list(read_conversation({"conversations": list(messages), **more}, form, "", {}).messages)


def calling(value: Any) -> tuple[Any, ...]:
    return read(ASKED, {"from": "function_call", "value": value})[-1].tool_calls


def test_the_sides_take_turns() -> None:
    expected = [Message("system", "Be kind"), Message("user", "Hi"), Message("assistant", "Hello")]
    assert read({"from": "system", "value": "Be kind"}, ASKED, SAID) == expected
    assert read({"from": "system", "value": " "}, ASKED, SAID) == expected[1:]
    assert read(ASKED, SAID, ASKED, SAID) == expected[1:] * 2


def test_the_systems_message_goes_before_its_column() -> None:
    form = RowSchema("sharegpt", {"system": "system"})
    assert read(ASKED, SAID, form=form, system="column")[0] == Message("system", "column")
    got = read({"from": "system", "value": "message"}, ASKED, SAID, form=form, system="column")
    assert [each.content for each in got if each.role == "system"] == ["message"]


def test_calls_and_observations_become_an_assistants_and_a_tools_messages() -> None:
    got = read(ASKED, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": ""}, SAID)
    assert got[1:3] == [Message("assistant", "", (CALLED,)), Message("tool", "")]


def test_a_call_may_be_one_or_several_and_its_arguments_an_object_or_its_text() -> None:
    for one in (CALL, [CALL], {"name": "add", "arguments": '{"a": 2}'}):
        assert calling(one) == calling(json.dumps(one)) == (CALLED,)
    assert calling(json.dumps([CALL, CALL])) == (CALLED, CALLED)
    for nothing in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": []}):  # the last, an empty map of Arrow's
        now = {"name": "now", **nothing}
        assert calling(now) == ({"type": "function", "function": {"name": "now", "arguments": {}}},)


def test_tags_are_renamed_and_openais_words_understood() -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "person", "assistant_tag": "robot"}
    form = RowSchema("sharegpt", {"messages": "conversations"}, tags)
    words = [("system", "a"), ("person", "b"), ("robot", "c"), ("user", "d"), ("assistant", "e"), ("tool", "f")]
    got = read(*({"role": role, "content": content} for role, content in [*words, ("gpt", "g")]), form=form)
    assert [each.role for each in got] == ["system", *["user", "assistant"] * 2, "tool", "assistant"]
    assert [each.content for each in got] == list("abcdefg")


@pytest.mark.parametrize("chosen", ["Better", {"from": "gpt", "value": "Better"}])
def test_of_preferences_the_chosen_answer_is_the_reply(chosen: Any) -> None:
    form = RowSchema("sharegpt", {"messages": "conversations", "chosen": "best", "rejected": "worst"}, ranking=True)
    assert read(ASKED, form=form, best=chosen, worst="x") == [Message("user", "Hi"), Message("assistant", "Better")]
    with pytest.raises(RowError, match="message 3 is of gpt where human or observation must stand"):
        read(ASKED, SAID, form=form, best=chosen)
    with pytest.raises(RowError, match="best is missing"):
        read(ASKED, form=form)
    with pytest.raises(RowError, match="message 2 is of human"):
        read(ASKED, form=form, best=ASKED)


FUNCTION = "function_call"
BAD = {
    "no messages": ([], "conversations is empty"),
    "the system alone": ([{"from": "system", "value": "x"}], "no message is the assistant's"),
    "an empty system alone": ([{"from": "system", "value": ""}], "no message is the assistant's"),
    "no role": ([ASKED, {"value": "x", "weight": None}], "message 2 has no 'from'; it has: value"),
    "unknown role": ([{"from": "bot", "value": "x"}], "message 1 has the unknown from 'bot'; known: assistant,"),
    "a role that is no text": ([{"from": ["gpt"], "value": "x"}], "message 1 has the unknown from ['gpt']"),
    "no content": ([ASKED, {"from": "gpt"}], "message 2 has no 'value'"),
    "empty content": ([ASKED, {"from": "gpt", "value": ""}], "message 2 is empty"),
    "content that is no text": ([ASKED, {"from": "gpt", "value": ["x"]}], "message 2 is a list, not a text"),
    "a message that is a text": (["Hi"], "message 1 is a text, not an object"),
    "the assistant first": ([SAID, ASKED], "message 1 is of gpt where human or observation must stand"),
    "two questions": ([ASKED, ASKED, SAID], "message 2 is of human where gpt or function_call must stand"),
    "two replies": ([ASKED, SAID, SAID], "message 3 is of gpt where human or observation must stand"),
    "a late system": ([ASKED, SAID, {"from": "system", "value": "x"}], "message 3 is of system where human"),
    "no reply at the end": ([ASKED, SAID, ASKED], "it ends with a message of the user"),
    "no reply": ([ASKED], "no message is the assistant's"),
    "a broken call": ([ASKED, {"from": FUNCTION, "value": "{'name'}"}], "message 2 is broken JSON: Expecting property"),
    "a call without content": ([ASKED, {"from": FUNCTION}], "message 2 has no 'value'"),
    "an empty call": ([ASKED, {"from": FUNCTION, "value": "[]"}], "message 2 holds no call"),
    "a call of nothing": ([ASKED, {"from": FUNCTION, "value": '{"arguments": {}}'}], "a call of message 2 has no name"),
    "a call that is a text": ([ASKED, {"from": FUNCTION, "value": '"add"'}], "message 2 calls a text, not an object"),
    "arguments that are no object": (
        [ASKED, {"from": FUNCTION, "value": '{"name": "add", "arguments": [1]}'}],
        "arguments of add in message 2 is a list, not an object",
    ),
    "broken arguments": (
        [ASKED, {"from": FUNCTION, "value": '{"name": "add", "arguments": "{a"}'}],
        "arguments of add in message 2 is broken JSON",
    ),
    "OpenAI's calls": ([ASKED, {**SAID, "tool_calls": [CALLED]}], "message 2 has tool_calls, which only the format"),
}


@pytest.mark.parametrize(("messages", "why"), BAD.values(), ids=BAD)
def test_a_conversation_out_of_order_says_where(messages: list[Any], why: str) -> None:
    with pytest.raises(RowError) as caught:
        read(*messages)
    assert str(caught.value).startswith(why)


@pytest.mark.parametrize(("value", "why"), [(None, "is missing"), ("[]", "is a text, not a list"), ({}, "an object")])
def test_conversations_that_are_no_list_are_reported(value: Any, why: str) -> None:
    with pytest.raises(RowError, match=f"conversations .*{why}"):
        read_conversation({"conversations": value}, FORM, "", {})
