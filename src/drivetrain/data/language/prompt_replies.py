"""Replies to prompts: the last message, a column of their own, or, of prompts alone, none.

A row without a reply is read as the conversation that it would be with one, by the readers of training data, so that
both take the same rows; then the reply is taken away again. It stands in once more where prompts are tokenised, whose
end is where the reply begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.row_schema import COLUMNS, RowError, RowSchema, kind

# columns of right answers beside a prompt, as data sets have them
REPLIES = ("output", "response", "completion", "answer", "solution", "ground_truth", "reply")
STAND_IN = "a reply"  # no prompt depends on it
LARGEST_WHOLE = 2**53  # floats above are no exact integers


def reply_column(rows: Sequence[Mapping[str, Any]], with_messages: bool) -> str | None:
    """Returns the column that has the right answers of rows which are prompts, if there is one.

    with_messages: whether the prompts are messages; then answers may be too. Texts and numbers always may.
    """
    keys = {key for row in rows for key in row}
    columns = [each for each in REPLIES if each in keys]
    return next((each for each in columns if all(_may_be_reply(row.get(each), with_messages) for row in rows)), None)


def _may_be_reply(value: Any, with_messages: bool) -> bool:
    return value is None or isinstance(value, str) or _is_number(value) or (with_messages and _are_messages(value))


def _are_messages(value: Any) -> bool:
    keys = ({"role", "content"}, {"from", "value"})
    return isinstance(value, list) and all(isinstance(e, dict) and any(k <= e.keys() for k in keys) for e in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def ends_with_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    """Returns whether the row has messages that end with a reply, or none that a reply could be added to."""
    if form.formatting == "alpaca":
        return False
    listed = row.get(form.required["messages"])
    last = listed[-1] if isinstance(listed, list) and listed else None
    word = last.get(form.tag("role_tag")) if isinstance(last, dict) else None
    return not isinstance(word, str) or form.roles.get(word) not in ("user", "observation", "system")


def lacks_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    """Returns whether the row is a prompt alone. Raises RowError if its reply is none."""
    return not ends_with_reply(row, form) and own_reply(row, form) is None


def own_reply(row: Mapping[str, Any], form: RowSchema) -> Any:
    """Returns the reply in a column of its own: a text, or messages that are not empty; None if it has none.

    Raises RowError for what is no reply, unless the column was guessed: it may hold something else in other rows.
    """
    usual = COLUMNS["alpaca"]["response"]
    column = form.required["response"] if form.formatting == "alpaca" else form.columns.get("response")
    value = None if column is None else row.get(column)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE:
        return str(int(value))  # whole numbers of a column with gaps
    if _is_number(value):
        return str(value)
    if isinstance(value, str):
        return value if value.strip() else None
    if form.formatting != "alpaca" and _are_messages(value):
        return value or None
    if value is None or (form.by_usual_names and column != usual):
        return None
    raise RowError(f"{column} is {kind(value)}, not a text")


def with_reply(row: Mapping[str, Any], form: RowSchema, reply: Any) -> Mapping[str, Any]:
    """Returns the row with a reply, a text or messages, at its end."""
    if form.formatting == "alpaca":
        return {**row, form.required["response"]: reply}
    column = form.required["messages"]
    message = {form.tag("role_tag"): form.tag("assistant_tag"), form.tag("content_tag"): reply}
    return {**row, column: [*row[column], *(reply if isinstance(reply, list) else [message])]}


def reference_of(row: Mapping[str, Any], form: RowSchema) -> str | None:
    """Returns the text that answers to a prompt are compared with; None if its row has none, or several messages, of
    which no single one is the answer."""
    reply = own_reply(row, form)
    if isinstance(reply, list):
        tag = form.tag("content_tag")
        reply = reply[0].get(tag) if len(reply) == 1 else None
    return reply if isinstance(reply, str) and reply.strip() else None


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


def columns_of(row: Mapping[str, Any], form: RowSchema) -> dict[str, Any]:
    """Returns the row's columns but that of the prompt, as JSON holds them: dates and the like as texts."""
    asked = {form.required.get("messages"), "prompt" if form.required.get("prompt") == "prompt" else None}
    return {name: _as_json(value) for name, value in row.items() if name not in asked}


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError):  # an object whose keys are no texts
        return str(value)
