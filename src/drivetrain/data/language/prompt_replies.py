"""Replies to prompts: the last message, a column of their own, or, of prompts alone, none.

A row without a reply is read as the conversation that it would be with one, by the readers of training data, so that
both take the same rows; then the reply is taken away again. It stands in once more where prompts are tokenised, whose
end is where the reply begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.row_schema import RowError, RowSchema

# columns of right answers beside a prompt, as data sets have them
REPLIES = ("output", "response", "completion", "answer", "solution", "ground_truth", "reply")
STAND_IN = "a reply"  # no prompt depends on it


def reply_column(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the column that has the right answers of rows which are prompts, if there is one: texts, numbers, or
    lists of messages."""
    keys = {key for row in rows for key in row}
    columns = [each for each in REPLIES if each in keys]
    return next((each for each in columns if all(_can_be_reply(row.get(each)) for row in rows)), None)


def _can_be_reply(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) for each in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    """Returns whether the row is a conversation with its reply, or what no prompt can be made of."""
    if form.formatting == "alpaca":
        reply = row.get(form.required["response"])
        return reply is not None and not _is_number(reply) and not (isinstance(reply, str) and not reply.strip())
    listed = row.get(form.required["messages"])
    last = listed[-1] if isinstance(listed, list) and listed else None
    word = last.get(form.tag("role_tag")) if isinstance(last, dict) else None
    return not isinstance(word, str) or form.roles.get(word) not in ("user", "observation", "system")


def with_own_reply(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any] | None:
    """Returns a row that lacks its reply with the one that stands in the column of replies; None if none does,
    and of a row whose messages are no list."""
    column = form.required["response"] if form.formatting == "alpaca" else form.columns.get("response")
    reply = row.get(column) if column is not None else None
    if _is_number(reply):
        reply = str(reply)
    is_empty = reply is None or (isinstance(reply, str) and not reply.strip())
    has_prompt = form.formatting == "alpaca" or isinstance(row.get(form.required["messages"]), list)
    return _with(row, form, reply) if has_prompt and not is_empty else None


def with_stand_in(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any]:
    return _with(row, form, STAND_IN)


def _with(row: Mapping[str, Any], form: RowSchema, reply: Any) -> Mapping[str, Any]:
    if form.formatting == "alpaca":
        return {**row, form.required["response"]: reply}
    column = form.required["messages"]
    message = {form.tag("role_tag"): form.tag("assistant_tag"), form.tag("content_tag"): reply}
    return {**row, column: [*row[column], *(reply if isinstance(reply, list) else [message])]}


def prompt_of(found: Conversation) -> Conversation:
    """Returns the conversation without the reply that stood in. Raises RowError if nothing is asked."""
    prompt = found.messages[:-1]
    if not any(each.role != "system" for each in prompt):
        raise RowError("it has a system message alone: nothing is asked")
    if prompt[-1].role == "system":
        raise RowError("it ends with a message of the system, where the user's must stand")
    return replace(found, messages=prompt)


def answered(prompt: Conversation) -> Conversation:
    """Returns the conversation with a reply at its end: its own, or the one that stands in."""
    if prompt.messages[-1].role == "assistant":
        return prompt
    return replace(prompt, messages=(*prompt.messages, Message("assistant", STAND_IN)))


def columns_of(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any]:
    """Returns the row's columns but its messages, as JSON holds them: dates and the like as texts."""
    messages = form.required.get("messages")
    found: dict[str, Any] = json.loads(json.dumps({k: v for k, v in row.items() if k != messages}, default=str))
    return found
