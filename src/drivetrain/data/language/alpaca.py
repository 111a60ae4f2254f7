"""Reads Alpaca's rows: instruction, input and output, with the earlier turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.row_schema import RowError, RowSchema, kind, optional_text, text


def read_alpaca(row: Mapping[str, Any], form: RowSchema) -> list[Message]:
    """Returns pairs of user's and assistant's messages: the history's, then the row's own. Raises RowError with what is
    missing."""
    names = form.named
    pairs = [*_history(form.value(row, "history"))]
    instruction = text(form.value(row, "prompt"), names["prompt"])
    query = optional_text(form.value(row, "query"), names.get("query", "input"))
    if form.ranking:
        response = text(_chosen(form.value(row, "chosen"), form), names["chosen"])
    else:
        response = text(form.value(row, "response"), names["response"])
    pairs.append((f"{instruction}\n{query}" if query else instruction, response))
    return [
        message for asked, answered in pairs for message in (Message("user", asked), Message("assistant", answered))
    ]


def _history(value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(f"history is {kind(value)}, not a list of pairs")
    pairs = []
    for number, pair in enumerate(value, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"pair {number} of the history is no list of an instruction and a response")
        what = f"pair {number} of the history"
        pairs.append((text(pair[0], f"the instruction in {what}"), text(pair[1], f"the response in {what}")))
    return pairs


def _chosen(value: Any, form: RowSchema) -> Any:
    """Returns the text of a message, or of its substitute."""
    if isinstance(value, dict):
        return value.get(form.tag("content_tag"), value.get("content"))
    return value
