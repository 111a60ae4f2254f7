"""Reads OpenAI's chat messages, in the form of its fine-tuning and of Transformers' chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.message_lists import MessageList, given_messages, plain_message
from drivetrain.data.language.row_schema import RowError, RowSchema, kind, optional_text
from drivetrain.data.language.tool_calls import Call, read_function_call, read_tool_calls

PARTS = {  # of LLaMA-Factory's newer form, which a message has beside its content here
    "reasoning": "write it as the message's reasoning_content",
    "tool_call": "write it as the message's tool_calls, [{function: {name: ..., arguments: ...}}]",
}


def read_openai(row: Mapping[str, Any], form: RowSchema) -> list[Message]:
    """Reads messages in any order of roles. Content may be null beside tool_calls, or a list of parts of text; an
    assistant's weight 0 keeps it from being trained on. Raises RowError with the number of a message of another form.
    """
    messages = [_message(each, form) for each in given_messages(row, form)]
    if form.ranking and messages[-2].role == "assistant":
        raise RowError("a reply stands before the chosen one already")
    replies = [each for each in messages if each.role == "assistant"]
    if replies and not any(each.trained for each in replies):
        raise RowError("every assistant's message has weight 0")
    return messages


def _message(given: MessageList, form: RowSchema) -> Message:
    if isinstance(given.content, list):
        given = given._replace(content=_joined(given.content, given.what))
    reasoning = _optional(given, "reasoning_content") if given.role == "assistant" else None
    name = given.fields.get("name")
    spoken = _spoken(given, form)
    if reasoning is None and not isinstance(name, str):
        return spoken  # as most are: copies take longer than all else
    return replace(spoken, name=name if isinstance(name, str) else None, reasoning_content=reasoning)


def _spoken(given: MessageList, form: RowSchema) -> Message:
    if given.role == "function" and given.content is not None:
        return Message("assistant", "", read_function_call(given.content, given.what))
    if given.role == "observation":
        return replace(plain_message(given, form), tool_call_id=_optional(given, "tool_call_id"))
    if given.role != "assistant":
        return plain_message(given, form)
    trained = _weight(given) != 0
    calls = _calls(given)
    if not calls:
        return plain_message(given, form, trained)
    if not isinstance(given.content, str | None):
        raise RowError(f"{given.what} is {kind(given.content)}, not a text")
    return Message("assistant", given.content or "", calls, trained)


def _optional(given: MessageList, key: str) -> str | None:
    """Returns a text, or None for an empty one too. Raises RowError for anything else."""
    return optional_text(given.fields.get(key), f"{key} of {given.what}") or None


def _calls(given: MessageList) -> tuple[Call, ...]:
    """Returns tool_calls, or function_call, the older name."""
    former = given.fields.get("function_call")
    return read_tool_calls(given.fields.get("tool_calls"), given.what) or (
        read_function_call(former, given.what) if former else ()
    )


def _weight(given: MessageList) -> int:
    name = "loss_weight" if "loss_weight" in given.fields else "weight"  # as LLaMA-Factory's newer form, or OpenAI's
    weight = given.fields.get(name)
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise RowError(f"{given.what} has {name} {weight!r}, which may be 0 or 1")
    return int(weight)


def _unread(part: Any) -> str:
    """Returns why a part of a message's content cannot be read, and how to write it instead if there is a way."""
    if not isinstance(part, dict):
        return f"has a part that is {kind(part)}, no mapping of type and text"
    given = part.get("type")
    if given in PARTS:
        return f"has a part of type {given}: {PARTS[given]}"
    if given != "text":
        return f"has a part that is no text ({given}): only texts are read"
    return "has a part of type text without a text: write {type: text, text: ...}"


def _joined(content: list[Any], what: str) -> str:
    """Returns the text of a list of parts."""
    texts = []
    for part in content:
        text = part.get("text", part.get("value")) if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise RowError(f"{what} {_unread(part)}")
        texts.append(text)
    return "".join(texts)
