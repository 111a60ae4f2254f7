"""Replies are read the same at once and in any pieces, and nothing of them is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.generation.replies import Call, Form, Part, ReplyReader, form_of, whole

CALL = Call("weather", '{"town": "Köln"}')
ONE = '{"name": "weather", "arguments": {"town": "Köln"}}'
LLAMAS = '{"name": "weather", "parameters": {"town": "Köln"}}'


def merged(parts: list[Part]) -> tuple[str, str, list[Call]]:
    """Text, thought and calls of a reply."""
    calls = [part.call for part in parts if part.call is not None]
    return "".join(part.text for part in parts), "".join(part.thought for part in parts), calls


@pytest.mark.parametrize(
    ("form", "reply", "expected"),
    [
        (None, "plain", ("plain", "", [])),
        (None, f"<tool_call>{ONE}</tool_call>", (f"<tool_call>{ONE}</tool_call>", "", [])),
        (None, "<think>\na\n</think>\n\nb", ("b", "a", [])),
        ("tags", f"Look.\n<tool_call>\n{ONE}\n</tool_call>", ("Look.", "", [CALL])),
        ("tags", f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", ("", "", [CALL, CALL])),
        ("tags", f"<think>\nhm\n</think>\n\n<tool_call>{ONE}</tool_call>", ("", "hm", [CALL])),
        ("tags", "<tool_call>{broken</tool_call>", ("<tool_call>{broken</tool_call>", "", [])),
        ("tags", f"<tool_call>{ONE}", ("", "", [CALL])),
        ("tags", "a < b <too\n", ("a < b <too\n", "", [])),
        ("list", f"[TOOL_CALLS] [{ONE}, {ONE}]", ("", "", [CALL, CALL])),
        ("list", "[TOOL_CALLS] none", ("[TOOL_CALLS] none", "", [])),
        ("bare", LLAMAS, ("", "", [CALL])),
        ("bare", f"<|python_tag|>{LLAMAS}", ("", "", [CALL])),
        ("bare", '{"a": 1}', ('{"a": 1}', "", [])),
        ("bare", "said {x}", ("said {x}", "", [])),
    ],
)
def test_a_reply_is_read_alike_at_once_and_character_by_character(
    form: Form | None, reply: str, expected: tuple[str, str, list[Call]]
) -> None:
    reader = ReplyReader(form)
    pieces = [part for char in reply for part in reader.feed(char)]
    assert merged(whole(reply, form)) == expected
    assert merged([*pieces, *reader.end()]) == expected


def test_a_prompt_that_opens_a_thought_begins_within_it() -> None:
    assert merged(whole("\nso it is\n</think>\nYes.", None, thinking=True)) == ("Yes.", "so it is", [])
    assert merged(whole("never ends", None, thinking=True)) == ("", "never ends", [])


def test_a_mark_that_may_follow_is_held_back_and_no_more() -> None:
    reader = ReplyReader("tags")
    assert reader.feed("Hello <tool") == [Part("Hello ")]
    assert reader.feed("box>") == [Part("<toolbox>")]


@given(
    st.sampled_from([None, "tags", "list", "bare"]),
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "\n", "x{", ONE])),
    st.data(),
)
def test_any_cut_of_a_reply_gives_the_same(form: Form | None, parts: list[str], data: st.DataObject) -> None:
    reply = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=6)))
    reader, found = ReplyReader(form), []
    for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
        found += reader.feed(reply[start:end])
    assert merged([*found, *reader.end()]) == merged(whole(reply, form))


def test_the_form_is_the_templates() -> None:
    assert form_of("... <tool_call> ...") == "tags"
    assert form_of("... [TOOL_CALLS] ...") == "list"
    assert form_of("{% if tools %}...{% endif %}") == "bare"
    assert form_of("{{ messages }}") is None
    assert json.loads(CALL.arguments) == {"town": "Köln"}
