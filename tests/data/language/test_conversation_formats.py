"""Tests what all formats share, and LLaMA-Factory's demonstration data as a whole. Each format has its own file."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.json_rows import HeldRows
from drivetrain.data.language.conversation_formats import BadRow, Read, RowSchema, read_conversations
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.guessed_formats import guess_formatting
from drivetrain.data.language.registry import find, read_registry
from drivetrain.data.rows import open_rows
from drivetrain.errors import UserError
from tests.properties import examples

ALPACA = {"instruction": "Hi", "input": "", "output": "Hello"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
TURNS = (Message("user", "Hi"), Message("assistant", "Hello"))


def read(rows: list[dict[str, Any]], form: RowSchema, **replace: str) -> Read:
    return read_conversations(HeldRows("a.json", rows), form, "F", replace)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("identity", 91),
        ("alpaca_en_demo", 999),
        ("alpaca_zh_demo", 1000),
        ("glaive_toolcall_en_demo", 300),
        ("dpo_en_demo", 300),
    ],
)
def test_llama_factorys_demonstration_data_are_read_by_name(
    shared_data: Path, tmp_path: Path, name: str, count: int, stream: bool
) -> None:
    entry = find(read_registry(str(shared_data / "sft"), "F"), name, "F")
    raw = json.loads(Path(entry.path).read_text(encoding="utf-8"))
    path = entry.path
    if stream:
        path = str(tmp_path / "lines.jsonl")
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in raw))
    rows = open_rows(path, "F", stream=stream)
    got = read_conversations(rows, entry.form, "F", {"{{name}}": "Ada", "{{author}}": "Charles"})
    assert (len(raw), len(got.conversations), got.problems) == (count, count, [])
    assert [each.where for each in got.conversations] == [rows.where(index) for index in range(count)]
    for row, conversation in zip(raw, got.conversations, strict=True):
        assert [(each.role, each.content) for each in conversation.messages] == expected(row)
        assert list(conversation.tools) == [
            {"type": "function", "function": tool} for tool in json.loads(row.get("tools", "[]"))
        ]
    guessed = guess_formatting(rows.read(0, 20), "F", name)
    assert read_conversations(rows, guessed, "F", {"{{name}}": "Ada", "{{author}}": "Charles"}) == got


def expected(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Roles and contents of a row of the demonstration data, by a few lines that know no other data."""
    if "instruction" in row:
        asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        reported = row["output"].replace("{{name}}", "Ada").replace("{{author}}", "Charles")
        return [("user", asked), ("assistant", reported)]
    roles = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
    roles["system"] = "system"
    messages = [*row["conversations"], *([row["chosen"]] if "chosen" in row else [])]
    return [(roles[each["from"]], "" if each["from"] == "function_call" else each["value"]) for each in messages]


def test_the_calls_of_the_demonstration_data_are_objects(shared_data: Path) -> None:
    entry = find(read_registry(str(shared_data / "sft"), "F"), "glaive_toolcall_en_demo", "F")
    raw = json.loads(Path(entry.path).read_text(encoding="utf-8"))
    got = read_conversations(open_rows(entry.path, "F"), entry.form, "F", {}).conversations
    calls = [list(each.tool_calls) for conversation in got for each in conversation.messages if each.tool_calls]
    texts = [each["value"] for row in raw for each in row["conversations"] if each["from"] == "function_call"]
    assert len(calls) > 200
    for read_calls, text in zip(calls, texts, strict=True):
        held = json.loads(text)
        assert [call["function"] for call in read_calls] == (held if isinstance(held, list) else [held])


@pytest.mark.parametrize(
    ("row", "form"),
    [(ALPACA, RowSchema("alpaca")), (SHAREGPT, RowSchema("sharegpt")), (OPENAI, RowSchema("openai"))],
    ids=["alpaca", "sharegpt", "openai"],
)
def test_system_and_tools_are_read_from_their_columns_in_every_format(row: dict[str, Any], form: RowSchema) -> None:
    named = RowSchema(form.formatting, {"system": "rule", "tools": "functions"})
    tool = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": tool}
    for tools in (json.dumps([tool]), [tool], [wrapped], json.dumps([wrapped])):
        (conversation,) = read([{**row, "rule": "Be kind", "functions": tools}], named).conversations
        assert conversation == Conversation((Message("system", "Be kind"), *TURNS), (wrapped,))
        assert conversation.where == "a.json row 1"
    for nothing in ("", "[]", [], None):
        (conversation,) = read([{**row, "rule": "", "functions": nothing}], named).conversations
        assert conversation == Conversation(TURNS)
    assert read([row], form).conversations == [Conversation(TURNS)]


BAD_TOOLS = {
    "broken": ("[{]", "tools is broken JSON: Expecting property name enclosed in double quotes (character 3)"),
    "an object": ({"name": "add"}, "tools is an object, not a list"),
    "texts": (["add"], "tool 1 is a text, not an object"),
    "no name": ([{"name": "add"}, {"description": "x"}], "tool 2 has no name"),
    "no function": ([{"type": "function", "function": None}], "tool 1 has no name"),
}


@pytest.mark.parametrize(("tools", "why"), BAD_TOOLS.values(), ids=BAD_TOOLS)
def test_tools_that_are_none_make_a_bad_row(tools: Any, why: str) -> None:
    (bad,) = read([{**OPENAI, "tools": tools}], RowSchema("openai")).problems
    assert bad.why.startswith(why)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "cannot be written as JSON: Out of range float"),
        (datetime(2026, 1, 2), "cannot be written as JSON: Object of type datetime"),
        ("\ud83d", "a call or a tool has half a character"),
    ],
)
def test_calls_that_no_json_can_hold_make_a_bad_row(value: Any, why: str) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": value}}}]}
    row = {"messages": [{"role": "user", "content": "x"}, call]}
    assert why in read([row], RowSchema("openai")).problems[0].why
    tools = {**OPENAI, "tools": [{"name": "f", "parameters": {"default": value}}]}
    assert why in read([tools], RowSchema("openai")).problems[0].why


def test_half_a_character_makes_a_bad_row() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\ud83d"}]}
    why = read([row], RowSchema("openai")).problems[0].why
    assert why == "the assistant's message 2 has half a character ('\\ud83d', character 2)"


def test_placeholders_are_filled_in_reasoning_too() -> None:
    reported = {"role": "assistant", "content": "{{name}}", "reasoning_content": "I am {{name}}"}
    row = {"messages": [{"role": "user", "content": "Who?"}, reported]}
    reply = read([row], RowSchema("openai"), **{"{{name}}": "Ada"}).conversations[0].messages[-1]
    assert (reply.content, reply.reasoning_content) == ("Ada", "I am Ada")


def test_a_name_that_a_few_rows_misspell_is_these_rows_fault() -> None:
    rows = [SHAREGPT, SHAREGPT, {"conversation": SHAREGPT["conversations"]}]
    assert guess_formatting(rows, "F", "a.json").required == {"messages": "conversations"}


def test_placeholders_are_filled_in_all_contents_once() -> None:
    row = {"instruction": "I am {{name}}", "output": "{{name}} by {{author}}", "system": "{{author}}"}
    form = RowSchema("alpaca", {"system": "system"})
    (got,) = read([row], form, **{"{{auth": "x", "{{name}}": "{{author}}", "{{author}}": "Ada"}).conversations
    assert [each.content for each in got.messages] == ["Ada", "I am {{author}}", "{{author}} by Ada"]
    with pytest.raises(UserError, match="an empty text cannot be replaced"):
        read([row], form, **{"": "x"})


TRL = {"prompt": "Hi", "completion": "Hello"}
LAYOUTS: dict[str, tuple[dict[str, Any], RowSchema]] = {
    "openai": (OPENAI, RowSchema("openai")),
    "sharegpt": (SHAREGPT, RowSchema("sharegpt")),
    "alpaca": (ALPACA, RowSchema("alpaca", by_usual_names=True)),
    "TRL's": (TRL, RowSchema("alpaca", {"prompt": "prompt", "response": "completion"})),
}


@pytest.mark.parametrize(("row", "form"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("marks", [("label", False), ("kto_tag", False), ("label", "False")], ids=str)
def test_replies_that_a_row_marks_as_to_be_avoided_are_refused(
    row: dict[str, Any], form: RowSchema, marks: tuple[str, Any]
) -> None:
    name, value = marks
    got = read([{**row, name: True}, {**row, name: value}, {**row, name: None}], form)
    assert [each.where for each in got.conversations] == ["a.json row 1", "a.json row 3"]
    (bad,) = got.problems
    assert bad.where == "a.json row 2"
    assert f"its {name} is false: a reply to avoid, as in KTO data" in bad.why


@pytest.mark.parametrize(("row", "form"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("label", [0, 1, "negative", 2.5, True, None])
def test_labels_of_classes_beside_conversations_are_no_matter(row: dict[str, Any], form: RowSchema, label: Any) -> None:
    assert read([{**row, "label": label}], form).problems == []


def test_a_column_that_is_read_as_the_reply_is_no_mark() -> None:
    rows = [{"claim": "Snow is hot.", "label": "False"}]
    got = read(rows, RowSchema("alpaca", {"prompt": "claim", "response": "label"}))
    assert got.conversations[0].messages[-1].content == "False"


@pytest.mark.parametrize(("row", "form"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("listed", [False, True])
def test_preferences_beside_conversations_that_are_not_read_are_refused(
    row: dict[str, Any], form: RowSchema, listed: bool
) -> None:
    reported = {"role": "assistant", "content": "x"}
    given = {**row, "chosen": [reported] if listed else "x", "rejected": [reported] if listed else "y"}
    assert [bad.where for bad in read([row, given], form).problems] == ["a.json row 2"]
    (bad,) = read([given], form).problems
    assert "a chosen and a rejected reply beside the conversation" in bad.why
    assert not read([{**given, "rejected": None}], form).problems


def test_bad_rows_are_distinguished_from_good_ones_by_their_place() -> None:
    rows = [ALPACA, {"instruction": "Hi"}, ALPACA, {"instruction": 3, "output": "x"}]
    got = read(rows, RowSchema("alpaca"))
    assert [each.where for each in got.conversations] == ["a.json row 1", "a.json row 3"]
    bad = [BadRow("a.json row 2", "output is missing"), BadRow("a.json row 4", "instruction is a number, not a text")]
    assert got.problems == bad


def test_columns_that_no_row_has_are_refused_with_the_nearest() -> None:
    form = RowSchema("alpaca", {"prompt": "instructions", "system": "sytem", "response": "output", "rejected": "bad"})
    with pytest.raises(UserError) as caught:
        read([{**ALPACA, "system": ""}], form)
    reported = str(caught.value)
    assert (
        "no row has the column 'instructions' (prompt of the format alpaca)\n    did you mean instruction?" in reported
    )
    assert "'sytem' (system of the format alpaca)\n    did you mean system? Rows have: instruction, input" in reported
    assert len(caught.value.problems) == 2  # the rejected answers are not read
    preferences = RowSchema("alpaca", {"response": "output", "chosen": "chosen"}, ranking=True)
    assert len(read([{"instruction": "Hi", "chosen": "Hello"}], preferences).conversations) == 1  # nor is the response
    with pytest.raises(UserError, match="no row has the column 'conversations'"):
        read([OPENAI], RowSchema("sharegpt"))
    assert len(read([ALPACA, {**ALPACA, "system": "x"}], RowSchema("alpaca", {"system": "system"})).conversations) == 2


def test_names_that_a_format_does_not_have_are_refused_before_reading() -> None:
    form = RowSchema("sharegpt", {"mesages": "conversations", "prompt": "x"}, {"role": "from"})
    with pytest.raises(UserError) as caught:
        read([SHAREGPT], form)
    reported = str(caught.value)
    assert "sharegpt has no columns.mesages\n    did you mean messages?" in reported
    assert "sharegpt has no columns.prompt\n    known: messages, system, tools, chosen" in reported
    assert "sharegpt has no tags.role\n    did you mean role_tag?" in reported


GUESSED = {
    "alpaca": ([ALPACA], RowSchema("alpaca", {"prompt": "instruction", "query": "input", "response": "output"})),
    "alpaca with more": (
        [{"instruction": "a", "output": "b"}, {"system": "c", "history": [], "other": 1}],
        RowSchema("alpaca", {c: c for c in ("history", "system")} | {"prompt": "instruction", "response": "output"}),
    ),
    "sharegpt": ([SHAREGPT], RowSchema("sharegpt", {"messages": "conversations"})),
    "sharegpt with tools": (
        [{**SHAREGPT, "tools": "[]"}],
        RowSchema("sharegpt", {"messages": "conversations", "tools": "tools"}),
    ),
    "sharegpt as messages": (
        [{"messages": SHAREGPT["conversations"]}],
        RowSchema("sharegpt", {"messages": "messages"}),
    ),
    "openai": ([OPENAI], RowSchema("openai", {"messages": "messages"})),
    "openai as conversation": (
        [{"conversation": OPENAI["messages"]}],
        RowSchema("openai", {"messages": "conversation"}),
    ),
    "preferences in alpaca": (
        [{"instruction": "a", "chosen": "b", "rejected": "c"}],
        RowSchema("alpaca", {"prompt": "instruction"}, ranking=True),
    ),
    "lists of preferences beside the messages": (
        [{**OPENAI, "chosen": [], "rejected": []}],
        RowSchema("openai", {"messages": "messages"}),
    ),
}


@pytest.mark.parametrize(("rows", "form"), GUESSED.values(), ids=GUESSED)
def test_the_format_is_known_by_the_keys(rows: list[dict[str, Any]], form: RowSchema) -> None:
    assert guess_formatting(rows, "F", "a.json") == replace(form, by_usual_names=True)


def test_what_is_known_of_columns_and_tags_helps_to_guess() -> None:
    columns = {"prompt": "input", "response": "target"}
    assert guess_formatting([{"input": "a", "target": "b"}], "F", "a", columns) == RowSchema("alpaca", columns)
    assert guess_formatting([{"input": "a", "target": "b", **OPENAI}], "F", "a", columns) == RowSchema(
        "alpaca", columns
    )
    tags = {"role_tag": "who", "content_tag": "what"}
    rows = [{"talk": [{"who": "human", "what": "Hi"}, {"who": "gpt", "what": "Hello"}]}]
    form = guess_formatting(rows, "F", "a", {"messages": "talk"}, tags)
    assert form == RowSchema("sharegpt", {"messages": "talk"}, tags)
    assert read(rows, form).conversations == [Conversation(TURNS)]


def test_keys_that_fit_no_format_or_two_are_refused() -> None:
    with pytest.raises(UserError, match=r"rows of a\.csv have question, answer: no format that .*\n.*instruction"):
        guess_formatting([{"question": "a", "answer": "b"}], "F", "a.csv")
    with pytest.raises(UserError, match=r"one format: alpaca \(instruction, output\) and openai \(messages\)"):
        guess_formatting([{**ALPACA, **OPENAI}], "F", "a.csv")
    with pytest.raises(UserError, match="no format"):
        guess_formatting([{"messages": ["text"]}], "F", "a.csv")


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10).filter(str.strip)
calls = st.tuples(texts, st.dictionaries(texts, st.integers() | texts, max_size=2))
turns = st.lists(st.tuples(texts, st.none() | calls, texts), min_size=1, max_size=3)


@settings(deadline=None, max_examples=examples(60))
@given(turns, st.none() | texts)
def test_one_conversation_is_the_same_from_every_format(
    turns: list[tuple[str, tuple[str, dict[str, Any]] | None, str]], system: str | None
) -> None:
    """Each turn: what the user asks, perhaps a call and its result "done", and the reply."""
    sharegpt: list[dict[str, Any]] = [{"from": "system", "value": system}] if system else []
    openai: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for asked, call, reply in turns:
        sharegpt += [{"from": "human", "value": asked}]
        openai += [{"role": "user", "content": asked}]
        if call:
            held = {"name": call[0], "arguments": call[1]}
            sharegpt += [{"from": "function_call", "value": json.dumps(held)}, {"from": "observation", "value": "done"}]
            written = {"type": "function", "function": {**held, "arguments": json.dumps(call[1])}}
            openai += [{"role": "assistant", "content": None, "tool_calls": [written]}]
            openai += [{"role": "tool", "content": "done"}]
        sharegpt += [{"from": "gpt", "value": reply}]
        openai += [{"role": "assistant", "content": reply}]
    got = read([{"conversations": sharegpt}], RowSchema("sharegpt")).conversations
    assert got == read([{"messages": openai}], RowSchema("openai")).conversations
    assert [each.content for each in got[0].messages if each.role == "user"] == [turn[0] for turn in turns]
    if not any(call for _, call, _ in turns):
        history = [[asked, reply] for asked, _, reply in turns[:-1]]
        row = {"instruction": turns[-1][0], "output": turns[-1][2], "history": history, "system": system}
        assert got == read([row], RowSchema("alpaca", {"history": "history", "system": "system"})).conversations


words = st.sampled_from(["from", "value", "role", "content", "human", "user", "gpt", "assistant", "tool", "system"])
keys = words | st.sampled_from(["tool_calls", "function", "name", "arguments", "weight", "type", "text"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=4) | st.just('{"name": "add"}'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)
message = st.fixed_dictionaries({}, optional={key: anything for key in ("value", "content", "tool_calls", "weight")})
with_role = st.builds(lambda held, role: {**held, "from": role, "role": role}, message, words)
columns = ("instruction", "input", "output", "conversations", "messages", "history", "system", "tools", "chosen")


@settings(deadline=None, max_examples=examples(150))
@given(
    st.fixed_dictionaries({}, optional={name: anything | st.lists(with_role, max_size=4) for name in columns}),
    st.sampled_from(["alpaca", "sharegpt", "openai"]),
    st.booleans(),
)
def test_whatever_a_row_holds_is_a_conversation_or_a_bad_row(
    row: dict[str, Any], formatting: Any, ranking: bool
) -> None:
    named = {"system": "system", "tools": "tools", **({"history": "history"} if formatting == "alpaca" else {})}
    everything: dict[str, Any] = dict.fromkeys(columns)
    got = read([row, everything], RowSchema(formatting, named, ranking=ranking))
    assert len(got.conversations) + len(got.problems) == 2
    for conversation in got.conversations:
        assert conversation.messages[-1].role == "assistant"
        assert all(isinstance(each.content, str) for each in conversation.messages)


ASKED = [{"role": "user", "content": "Hi"}]
TRL: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi", "completion": "Hello"},
    "messages": {"prompt": ASKED, "completion": [{"role": "assistant", "content": "Hello"}]},
    "messages and a text": {"prompt": ASKED, "answer": "Hello"},
    "sharegpt's messages": {"prompt": [{"from": "human", "value": "Hi"}], "response": "Hello"},
}


@pytest.mark.parametrize("row", TRL.values(), ids=TRL)
def test_trls_prompt_and_completion_are_a_conversation(row: dict[str, Any]) -> None:
    got = read([row], guess_formatting([row], "F", "a.json"))
    assert got.problems == []
    assert [(each.role, each.content) for each in got.conversations[0].messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_of_a_prompt_of_messages_earlier_replies_are_not_trained() -> None:
    """TRL trains on the completion alone."""
    called = {"role": "assistant", "content": "A moment."}
    row = {"prompt": [*ASKED, called, *ASKED], "completion": [called, *ASKED, {"role": "assistant", "content": "Bye"}]}
    [found] = read([row], guess_formatting([row], "F", "a.json")).conversations
    assert [each.trained for each in found.messages if each.role == "assistant"] == [False, True, True]


def test_a_prompt_of_messages_without_its_completion_is_a_problem() -> None:
    rows = [{"prompt": ASKED, "completion": "Hello"}, {"prompt": ASKED, "completion": None}, {"completion": "Hello"}]
    got = read(rows, guess_formatting(rows, "F", "a.json"))
    assert [each.why for each in got.problems] == ["completion is missing or empty", "prompt is missing"]


def test_labelled_completions_are_no_conversations() -> None:
    with pytest.raises(UserError, match="no format that is known"):
        guess_formatting([{**TRL["texts"], "label": True}], "F", "a.json")


def test_a_prompt_without_a_question_is_no_conversation_whatever_the_reply() -> None:
    alone = {"prompt": [{"role": "system", "content": "s"}], "completion": "a"}
    rows = [{"prompt": ASKED, "completion": "Hello"}, alone]
    [why] = [each.why for each in read(rows, guess_formatting(rows, "F", "a.json")).problems]
    assert why == "prompt has no message but the system's: nothing is asked"


def test_a_misspelt_column_of_replies_is_named_with_the_nearest() -> None:
    rows = [{"prompt": ASKED, "answer": "a"}]
    form = guess_formatting(rows, "F", "a.json", {"messages": "prompt", "response": "anwser"})
    with pytest.raises(UserError, match=r"(?s)no row has the column 'anwser'.*did you mean answer\?"):
        read(rows, form)


def test_rows_with_labels_have_no_column_of_replies() -> None:
    form = RowSchema("openai", {"messages": "prompt", "response": "answer", "kto_tag": "good"}, labels=True)
    with pytest.raises(UserError, match=r"the format openai has no columns\.response"):
        read([{"prompt": ASKED, "answer": "a", "good": True}], form)
