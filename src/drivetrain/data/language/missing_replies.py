"""Prompts without a reply, and the reply that stands in for the missing one.

A row without a reply is read as the conversation that it would be with one, by the readers of training data, so that
both take the same rows; then the reply is taken away again. It stands in once more where prompts are tokenised, whose
end is where the reply begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.row_schema import RowError, RowSchema

STAND_IN = "a reply"  # no prompt depends on it


def lacks_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    if form.formatting == "alpaca":
        reply = row.get(form.required["response"])
        return reply is None or (isinstance(reply, str) and not reply.strip())
    listed = row.get(form.required["messages"])
    last = listed[-1] if isinstance(listed, list) and listed else None
    word = last.get(form.tag("role_tag")) if isinstance(last, dict) else None
    return isinstance(word, str) and form.roles.get(word) in ("user", "observation", "system")


def with_reply(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any]:
    if form.formatting == "alpaca":
        return {**row, form.required["response"]: STAND_IN}
    column = form.required["messages"]
    reply = {form.tag("role_tag"): form.tag("assistant_tag"), form.tag("content_tag"): STAND_IN}
    return {**row, column: [*row[column], reply]}


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
