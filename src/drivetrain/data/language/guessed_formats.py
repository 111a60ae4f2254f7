"""Guesses the format of rows from the columns and messages of the first ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.data.language.prompt_replies import reply_column
from drivetrain.data.language.row_schema import COLUMNS, KTO_TAGS, USED, Formatting, RowSchema
from drivetrain.errors import problem

MESSAGES = ("messages", "conversations", "conversation")
TRL = ("prompt", "completion")
EXPECTED = (
    "alpaca has instruction and output, sharegpt conversations of {from, value}, openai messages of {role, content}, "
    "TRL prompt and completion"
)


def guess_formatting(
    first_rows: Sequence[Mapping[str, Any]],
    field: str,
    where: str,
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> RowSchema:
    """Returns the form whose keys the rows have, with every column that the format knows and the rows have.

    Rows with a chosen and a rejected answer are preference data (`RowSchema.ranking`). columns, tags: names known
    already, as in `RowSchema`. where: the data set, for the error. Raises UserError if no format fits, or more than
    one.
    """
    columns, tags = columns or {}, tags or {}
    keys = list(dict.fromkeys(key for row in first_rows for key in row))
    answers = any(isinstance(row.get("chosen"), str | dict) for row in first_rows)
    ranking = answers and "rejected" in keys and "response" not in columns
    forms: list[RowSchema] = []
    if "messages" not in columns:
        form = RowSchema("alpaca", columns or present(keys, "alpaca"), tags, ranking, by_usual_names=not columns)
        if set(form.required.values()) <= set(keys) or {"prompt", "response"} & columns.keys():
            forms.append(form)
    if not {"prompt", "response"} & columns.keys():
        for column in [columns["messages"]] if "messages" in columns else most_used(MESSAGES, first_rows):
            formatting = guessed_messages(first_rows, column, tags)
            if formatting is not None:
                named = {**(columns or present(keys, formatting)), "messages": column}
                forms.append(RowSchema(formatting, named, tags, ranking, by_usual_names=not columns))
    if not forms and not answers and (found := _as_trl(first_rows, columns, tags)):
        forms.append(found)
    if not forms:
        raise problem(field, f"rows of {where} have {', '.join(keys) or 'nothing'}: no format that is known", EXPECTED)
    if len(forms) > 1:
        fitting = " and ".join(f"{form.formatting} ({', '.join(form.required.values())})" for form in forms)
        raise problem(field, f"rows of {where} fit more than one format: {fitting}", "give formatting and columns")
    return forms[0]


def _as_trl(
    first: Sequence[Mapping[str, Any]], columns: Mapping[str, str], tags: Mapping[str, str]
) -> RowSchema | None:
    """Returns the schema of rows that have a prompt, of messages or a text, and the reply beside it, as TRL has
    them. None if the reply is labelled: such rows are preferences."""
    keys = list(dict.fromkeys(key for row in first for key in row))
    column = columns.get("messages", "prompt")
    formatting = guessed_messages(first, column, tags)
    reply = columns.get("response") or reply_column(first, formatting is not None)
    if reply is None or "chosen" in keys or any(tag in keys for tag in KTO_TAGS):
        return None
    if formatting is not None:
        named = {**present(keys, formatting), **columns, "messages": column, "response": reply}
        return RowSchema(formatting, named, tags, by_usual_names=not columns)
    are_texts = all(isinstance(row.get(each), str | None) for row in first for each in TRL)
    if columns or not are_texts or not set(TRL) <= set(keys):
        return None
    return RowSchema("alpaca", dict(zip(("prompt", "response"), TRL, strict=True)), tags, by_usual_names=True)


def most_used(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one of the columns, unless others are in as many rows: a name misspelt in a few rows is a fault of these
    rows."""
    counts = {column: sum(isinstance(row.get(column), list) for row in rows) for column in columns}
    return [column for column in columns if counts[column] == max(counts.values())]


def guessed_messages(
    rows: Sequence[Mapping[str, Any]], column: str, tags: Mapping[str, str]
) -> Literal["sharegpt", "openai"] | None:
    """Returns the format whose keys the messages in that column have. Tags that fit both are LLaMA-Factory's, for
    sharegpt."""
    lists = (row[column] for row in rows if isinstance(row.get(column), list))
    inside = {key for listed in lists for message in listed if isinstance(message, dict) for key in message}
    formattings: tuple[Literal["sharegpt", "openai"], ...] = ("sharegpt", "openai")
    for formatting in formattings:
        form = RowSchema(formatting, tags=tags)
        if {form.tag("role_tag"), form.tag("content_tag")} <= inside:
            return formatting
    return None


def present(keys: Sequence[str], formatting: Formatting) -> dict[str, str]:
    """Returns those of the format's columns that rows have by their usual names."""
    found = {name: COLUMNS[formatting].get(name, name) for name in USED[formatting]}
    return {name: column for name, column in found.items() if column in keys}
