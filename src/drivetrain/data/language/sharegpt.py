"""Reads ShareGPT's rows: {"from": "human", "value": "..."} each, with calls of functions and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.message_lists import MessageList, given_messages, plain_message
from drivetrain.data.language.row_schema import RowError, RowSchema
from drivetrain.data.language.tool_calls import read_function_call

TURNS = ("user", "observation"), ("assistant", "function")


def read_sharegpt(row: Mapping[str, Any], form: RowSchema) -> list[Message]:
    """Reads the system's message if there is one, then the two sides of TURNS one after the other, as LLaMA-Factory
    requires.

    Raises RowError with the number of the message that breaks this order.
    """
    given = given_messages(row, form)
    leading = 1 if given[0].role == "system" else 0
    for place, each in enumerate(given[leading:]):
        expected = TURNS[place % 2]
        if each.role not in expected:
            tags = " or ".join(form.tag(f"{role}_tag") for role in expected)
            raise RowError(f"{each.what} is of {each.word} where {tags} must stand")
    return [_message(each, form) for each in given]


def _message(given: MessageList, form: RowSchema) -> Message:
    if given.fields.get("tool_calls"):
        raise RowError(f"{given.what} has tool_calls, which only the format openai reads")
    if given.role == "function" and given.content is not None:
        return Message("assistant", "", read_function_call(given.content, given.what))
    return plain_message(given, form)
