"""Reads TRL's rows of preferences: a prompt with a chosen and a rejected answer, as texts or as lists of messages.

The prompt may be a column of its own (explicit), or the beginning that both answers have in common (implicit). Texts
have no roles: the prompt is read as the user's message, an answer as the reply, and a chat template renders them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.openai_messages import read_openai
from drivetrain.data.language.row_schema import RowError, RowSchema, kind, text


def is_trl(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> bool:
    """Returns whether pairs are in this form: messages within the answers, or texts without an instruction's column."""
    if {"messages", "query", "history"} & columns.keys():
        return False
    chosen = columns.get("chosen", "chosen")
    if any(isinstance(row.get(chosen), list) for row in rows):
        return True
    others = {"instruction", "conversations", "conversation", "messages"}
    return "prompt" not in columns and not any(others & row.keys() for row in rows)


def with_prompt(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any]:
    """Returns the row with an explicit prompt where two texts have one in common: all up to the last space before they
    differ (TRL's extract_prompt)."""
    names = form.required
    chosen, rejected, column = row.get(names["chosen"]), row.get(names["rejected"]), _prompt_column(form)
    if row.get(column) is not None or not (isinstance(chosen, str) and isinstance(rejected, str)):
        return row
    pairs = enumerate(zip(chosen, rejected, strict=False))
    end = next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise RowError("chosen and rejected are the same: there is nothing to prefer")
    cut = next((place for place in range(end, 0, -1) if chosen[place - 1].isspace()), 0)
    if not chosen[:cut].strip():
        raise RowError(f"it has no {column!r}, and its answers do not begin alike: there is no prompt")
    return {**row, column: chosen[:cut], names["chosen"]: chosen[cut:], names["rejected"]: rejected[cut:]}


def read_trl(row: Mapping[str, Any], form: RowSchema) -> list[Message]:
    """Returns the prompt's messages and those of the answer in the column `chosen`. Raises RowError with what is
    missing."""
    column, prompt = form.required["chosen"], row.get(_prompt_column(form))
    answer = row.get(column)
    if isinstance(answer, dict):
        answer = [answer]
    if not isinstance(answer, list):
        answer = [_written(form, "assistant", text(answer, column))]
        if not isinstance(prompt, list):
            prompt = [_written(form, "user", text(prompt, _prompt_column(form)))]
    if not answer:
        raise RowError(f"{column} is empty")
    if not isinstance(prompt, list):
        if prompt is not None and not isinstance(prompt, str):
            raise RowError(f"the prompt is {kind(prompt)}, not a list of messages")
        first = answer[0] if isinstance(answer[0], dict) else {}
        begins_with_answer = first.get(form.tag("role_tag")) == form.tag("assistant_tag")
        prompt = [_written(form, "user", prompt)] if prompt and begins_with_answer else []
    plain = RowSchema("openai", tags=form.tags)
    return read_openai({"messages": [*prompt, *answer]}, plain)


def _prompt_column(form: RowSchema) -> str:
    return form.columns.get("prompt", "prompt")


def _written(form: RowSchema, role: str, content: str) -> dict[str, str]:
    return {form.tag("role_tag"): form.tag(f"{role}_tag"), form.tag("content_tag"): content}
