"""Reads files of prompts: rows of which some, or all, have no reply.

A row is read as the conversation that it would be with a reply, by the readers of training data, so that both take the
same rows; the reply that stood in for the missing one is taken away again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from drivetrain.config.language_data import DataSource
from drivetrain.config.location import store_address
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.language.conversation_formats import (
    MESSAGES,
    guessed_messages,
    most_used,
    present,
    read_conversation,
)
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.row_forms import LOOKED_AT
from drivetrain.data.language.row_schema import COLUMNS, RowError, RowSchema
from drivetrain.data.packed_files import ending
from drivetrain.data.row_blocks import ENDINGS, TEXTS, RowFile
from drivetrain.errors import Problem, UserError

PROMPTS = ("instruction", "prompt", "question")
REPLIES = ("output", "response", "completion", "answer")
STAND_IN = "a reply"  # no prompt depends on it


@dataclass(frozen=True)
class PromptFiles:
    """The files of a path, and the schema of their rows. replace: texts put in the place of others."""

    files: Sequence[RowFile]
    form: RowSchema
    replace: Mapping[str, str]

    @property
    def name(self) -> str:
        return ", ".join(file.name for file in self.files[:3])

    @property
    def holds_texts(self) -> bool:
        """Returns whether these are text files alone, which a model without a chat template takes for texts."""
        return all(ending(file.path) in TEXTS for file in self.files)

    @cached_property
    def lack_replies(self) -> bool:
        """Returns whether some row has no reply. Reads up to the first of them."""
        return any(_lacks_reply(row, self.form) for file in self.files for row in _rows(file))

    def read(self, broken: list[Problem]) -> Iterator[Conversation | BadRow]:
        """Yields each row's conversation, or why it has none; a prompt alone ends with another message than a reply.
        broken: takes the problems of rows that cannot be read."""
        for file in self.files:
            faults: list[str] = []
            for block in file.blocks():
                faults += block.faults
                for row, number in zip(block.rows, block.numbers, strict=True):
                    where = file.where(number)
                    try:
                        yield self._conversation(row, where)
                    except RowError as error:
                        yield BadRow(where, str(error))
            broken += [file.broken(faults)] if faults else []

    def _conversation(self, row: Mapping[str, Any], where: str) -> Conversation:
        if not _lacks_reply(row, self.form):
            return read_conversation(row, self.form, where, self.replace)
        found = read_conversation(_with_reply(row, self.form), self.form, where, self.replace)
        prompt = found.messages[:-1]
        if not any(each.role != "system" for each in prompt):
            raise RowError("it has a system message alone: nothing is asked")
        if prompt[-1].role == "system":
            raise RowError("it ends with a message of the system, where the user's must stand")
        return dataclasses.replace(found, messages=prompt)


def prompt_files(path: str, field: str, source: DataSource, system: str | None) -> PromptFiles | None:
    """Returns the files of a path whose rows have prompts, some of them without a reply. None for others, whose reader
    explains what is wrong with them, and for data sets of the hub.

    source: how the run's own rows are read: its columns and tags are looked for first. A text file has a prompt a line.
    """
    if store_address(path) is not None or not is_there(path):
        return None
    try:
        named = data_files(path, field, ENDINGS)
    except UserError:
        return None
    if not all(ending(file) in ENDINGS and file.is_file() and file.stat().st_size for file in named.values()):
        return None
    files = [RowFile(file, name, field, "line") for name, file in named.items()]
    try:
        if all(ending(each.path) in TEXTS for each in files):
            form: RowSchema | None = RowSchema("alpaca", {"prompt": "text"}, default_system=system)
        else:
            first = list(islice((row for file in files for row in _rows(file)), LOOKED_AT))
            form = _form_of(first, source)
        if form is None:
            return None
        found = PromptFiles(files, dataclasses.replace(form, default_system=system), source.replace)
        return found if found.lack_replies else None
    except UserError:  # a file that cannot be read on
        return None


def _rows(file: RowFile) -> Iterator[Mapping[str, Any]]:
    for block in file.blocks():
        yield from block.rows


def _form_of(first: Sequence[Mapping[str, Any]], source: DataSource) -> RowSchema | None:
    """Returns the schema of rows that may lack their replies; None if they hold no prompts, two kinds of them, or
    preferences."""
    keys = list(dict.fromkeys(key for row in first for key in row))
    if "chosen" in keys or source.formatting == "text":
        return None
    columns, tags = source.columns, source.tags
    if columns.get("prompt") in keys:
        return RowSchema("alpaca", columns, tags)
    if source.formatting in ("sharegpt", "openai"):
        schema = RowSchema(source.formatting, columns, tags, by_usual_names=not columns)
        if schema.required["messages"] in keys:
            return schema
    listed = columns.get("messages")
    for column in [listed] if listed in keys else [*most_used(MESSAGES, first), "prompt"]:
        formatting = guessed_messages(first, column, tags)
        if formatting is not None and "instruction" not in keys and not (column == "prompt" and {*REPLIES} & {*keys}):
            return RowSchema(formatting, {**present(keys, formatting), "messages": column}, tags, by_usual_names=True)
    prompt = next((each for each in PROMPTS if each in keys), None)
    if prompt is None or any(isinstance(row.get(each), list) for row in first for each in (prompt, *MESSAGES)):
        return None
    # as in training data a bare "input" belongs to an instruction alone
    beside = present(keys, "alpaca") if prompt == "instruction" else {}
    reply = next((each for each in REPLIES if each in keys), COLUMNS["alpaca"]["response"])
    return RowSchema("alpaca", {**beside, "prompt": prompt, "response": reply}, tags, by_usual_names=True)


def _lacks_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    if form.formatting == "alpaca":
        reply = row.get(form.required["response"])
        return reply is None or (isinstance(reply, str) and not reply.strip())
    listed = row.get(form.required["messages"])
    last = listed[-1] if isinstance(listed, list) and listed else None
    word = last.get(form.tag("role_tag")) if isinstance(last, dict) else None
    return isinstance(word, str) and form.roles.get(word) in ("user", "observation", "system")


def _with_reply(row: Mapping[str, Any], form: RowSchema) -> Mapping[str, Any]:
    if form.formatting == "alpaca":
        return {**row, form.required["response"]: STAND_IN}
    column = form.required["messages"]
    reply = {form.tag("role_tag"): form.tag("assistant_tag"), form.tag("content_tag"): STAND_IN}
    return {**row, column: [*row[column], reply]}
