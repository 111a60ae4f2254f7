"""Decides how rows are read of which some, or all, are prompts without a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain.config.language_data import DataSource
from drivetrain.data.language.guessed_formats import (
    MESSAGES,
    guessed_messages,
    most_used,
    present,
)
from drivetrain.data.language.prompt_replies import reply_column
from drivetrain.data.language.row_schema import COLUMNS, RowSchema

PROMPTS = ("instruction", "prompt", "question")


def prompt_schema(first: Sequence[Mapping[str, Any]], source: DataSource) -> RowSchema | None:
    """Returns the schema of rows that may lack their replies; None if they hold no prompts, two kinds of them, or
    preferences."""
    keys = list(dict.fromkeys(key for row in first for key in row))
    if "chosen" in keys or source.formatting == "text":
        return None
    columns, tags = source.columns, source.tags
    if columns.get("prompt") in keys:
        return RowSchema("alpaca", columns, tags, prompts=True)
    if source.formatting in ("sharegpt", "openai"):
        schema = RowSchema(source.formatting, columns, tags, by_usual_names=not columns, prompts=True)
        if schema.required["messages"] in keys:
            return schema
    listed = columns.get("messages")
    for column in [listed] if listed in keys else [*most_used(MESSAGES, first), "prompt"]:
        formatting = guessed_messages(first, column, tags)
        if formatting is not None and "instruction" not in keys:
            named = {**present(keys, formatting), **columns, "messages": column}
            return with_reply_column(RowSchema(formatting, named, tags, by_usual_names=True, prompts=True), first)
    prompt = next((each for each in PROMPTS if each in keys), None)
    if prompt is None or any(isinstance(row.get(each), list) for row in first for each in (prompt, *MESSAGES)):
        return None
    # as in training data a bare "input" belongs to an instruction alone
    beside = present(keys, "alpaca") if prompt == "instruction" else {}
    named = {**beside, "prompt": prompt, "response": reply_column(first, False) or COLUMNS["alpaca"]["response"]}
    return RowSchema("alpaca", named, tags, by_usual_names=True, prompts=True)


def with_reply_column(form: RowSchema, first: Sequence[Mapping[str, Any]]) -> RowSchema:
    """Returns the schema of rows of messages, which may have the right answer in a column of its own."""
    column = reply_column(first, True) if form.by_usual_names and form.formatting != "alpaca" else None
    if column is None or "response" in form.columns or column == form.required.get("messages"):
        return form
    return replace(form, columns={**form.columns, "response": column})
