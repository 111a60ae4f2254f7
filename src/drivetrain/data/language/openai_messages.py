"""OpenAI's chat messages, as its fine-tuning and Transformers' chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.message_lists import MessageList, given_messages, plain_message
from drivetrain.data.language.row_schema import RowError, RowSchema, kind, optional_text
from drivetrain.data.language.tool_calls import Call, read_function_call, read_tool_calls


def read_openai(row: Mapping[str, Any], form: RowSchema) -> list[Message]:
    """In any order of roles. Content may be null beside tool_calls, or a list of parts of text; an assistant's weight
    0 keeps it from being trained on. RowError with the number of the message that is otherwise."""
    messages = [_message(each, form) for each in given_messages(row, form)]
    if form.ranking and messages[-2].role == "assistant":
        raise RowError("a reply stands before the chosen one already")
    replies = [each for each in messages if each.role == "assistant"]
    if replies and not any(each.trained for each in replies):
        raise RowError("every assistant's message has weight 0")
    return messages


def _message(given: MessageList, form: RowSchema) -> Message:
    given = replace(given, content=_joined(given.content, given.what))
    reasoning = _optional(given, "reasoning_content") if given.role == "assistant" else None
    name = given.fields.get("name")
    return replace(_spoken(given, form), name=name if isinstance(name, str) else None, reasoning_content=reasoning)


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
    """None for an empty text too. RowError for anything else."""
    return optional_text(given.fields.get(key), f"{key} of {given.what}") or None


def _calls(given: MessageList) -> tuple[Call, ...]:
    """tool_calls, or function_call as it was named before."""
    former = given.fields.get("function_call")
    return read_tool_calls(given.fields.get("tool_calls"), given.what) or (
        read_function_call(former, given.what) if former else ()
    )


def _weight(given: MessageList) -> int:
    weight = given.fields.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise RowError(f"{given.what} has weight {weight!r}, which may be 0 or 1")
    return int(weight)


def _joined(content: Any, what: str) -> Any:
    """The text of a list of parts; other content as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            other = part.get("type") if isinstance(part, dict) else kind(part)
            raise RowError(f"{what} has a part that is no text ({other}): only texts can be trained on")
        texts.append(part["text"])
    return "".join(texts)
