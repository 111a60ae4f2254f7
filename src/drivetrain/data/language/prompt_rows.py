"""Reads files of prompts: rows of which some, or all, have no reply."""

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
from drivetrain.data.language.conversation_formats import read_conversation
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.prompt_forms import prompt_schema
from drivetrain.data.language.prompt_replies import lacks_reply
from drivetrain.data.language.row_forms import LOOKED_AT
from drivetrain.data.language.row_schema import RowError, RowSchema
from drivetrain.data.packed_files import ending
from drivetrain.data.row_blocks import ENDINGS, TEXTS, RowFile
from drivetrain.errors import Problem, UserError


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
                        yield read_conversation(row, self.form, where, self.replace)
                    except RowError as error:
                        yield BadRow(where, str(error))
            broken += [file.broken(faults)] if faults else []


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
            form: RowSchema | None = RowSchema("alpaca", {"prompt": "text"}, default_system=system, prompts=True)
        else:
            first = list(islice((row for file in files for row in _rows(file)), LOOKED_AT))
            form = prompt_schema(first, source)
        if form is None:
            return None
        found = PromptFiles(files, dataclasses.replace(form, default_system=system), source.replace)
        return found if found.lack_replies else None
    except UserError:  # a file that cannot be read on
        return None


def _rows(file: RowFile) -> Iterator[Mapping[str, Any]]:
    for block in file.blocks():
        yield from block.rows


def _lacks_reply(row: Mapping[str, Any], form: RowSchema) -> bool:
    try:
        return lacks_reply(row, form)
    except RowError:  # reported when the row is read
        return False
