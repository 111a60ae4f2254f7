"""Reads the common part of ShareGPT's and OpenAI's rows: a list of messages, each with a role and content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from drivetrain.data.language.conversations import Message, Role
from drivetrain.data.language.row_schema import RowError, RowSchema, kind, text

PLAIN: dict[str, Role] = {"user": "user", "assistant": "assistant", "observation": "tool", "system": "system"}


class MessageList(NamedTuple):
    """One message as the row holds it. role: user, assistant, observation, function or system; word: the row's word for
    it."""

    what: str  # "message 3", for errors
    role: str
    word: str
    content: Any
    fields: Mapping[str, Any]


def given_messages(row: Mapping[str, Any], form: RowSchema) -> list[MessageList]:
    """Returns the row's messages, and the chosen reply behind them in preference data. Raises RowError with what is
    missing."""
    column = form.required["messages"]
    listed = form.value(row, "messages")
    if not isinstance(listed, list):
        raise RowError(f"{column} is missing" if listed is None else f"{column} is {kind(listed)}, not a list")
    if not listed:
        raise RowError(f"{column} is empty")
    if form.ranking:
        listed = [*listed, _chosen(form.value(row, "chosen"), form)]
    roles = form.roles
    return [_given(message, f"message {number}", form, roles) for number, message in enumerate(listed, start=1)]


def _chosen(value: Any, form: RowSchema) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    return {
        form.tag("role_tag"): form.tag("assistant_tag"),
        form.tag("content_tag"): text(value, form.required["chosen"]),
    }


def _given(message: Any, what: str, form: RowSchema, roles: Mapping[str, str]) -> MessageList:
    if not isinstance(message, dict):
        raise RowError(f"{what} is {kind(message)}, not an object")
    role_tag = form.tag("role_tag")
    word = message.get(role_tag)
    if word is None:
        keys = ", ".join(str(key) for key, value in message.items() if value is not None) or "nothing"
        raise RowError(f"{what} has no {role_tag!r}; it has: {keys}")
    if not isinstance(word, str) or word not in roles:
        raise RowError(f"{what} has the unknown {role_tag} {word!r}; known: {', '.join(sorted(roles))}")
    return MessageList(what, roles[word], word, message.get(form.tag("content_tag")), message)


def plain_message(given: MessageList, form: RowSchema, trained: bool = True) -> Message:
    """Returns a message of text alone. Only a tool's result and the system's message may be empty."""
    if given.content is None:
        raise RowError(f"{given.what} has no {form.tag('content_tag')!r}")
    if not isinstance(given.content, str):
        raise RowError(f"{given.what} is {kind(given.content)}, not a text")
    if given.role in ("user", "assistant"):
        text(given.content, given.what)
    return Message(PLAIN[given.role], given.content, trained=trained)
