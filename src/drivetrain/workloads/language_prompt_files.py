"""Prompts of a file that is predicted for: rows of which some have no reply, so that no loss can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageModel
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.prompt_rows import PromptFiles, prompt_files
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.language.sets import DataSet, bad_row_problems
from drivetrain.errors import Problem, UserError, problem
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.language_prompts import ids_of_prompt, split_at_reply, text_of

FIELD = "--data"


class FilePrompts(Sequence[Prompt]):
    """Prompts as arrays of tokens, of which each becomes a `Prompt` when it is answered: a file may have millions."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rows: list[tuple[np.ndarray, str | None, str]] = []

    def add(self, ids: Sequence[int], reference: str | None, name: str) -> None:
        self._rows.append((np.array(ids, np.int32), reference, name))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._prompt(*row) for row in self._rows[index]]
        return self._prompt(*self._rows[index])

    def _prompt(self, held: np.ndarray, reference: str | None, name: str) -> Prompt:
        ids = held.tolist()
        return Prompt(text_of(self._tokenizer, ids), tuple(ids), reference, name)


def prompts_in(path: str, reader: LanguageReader, config: LanguageModel) -> FilePrompts | None:
    """Returns the prompts of the rows at `path`; None where each row has its reply, or rows are no prompts. Raises
    UserError with all rows that cannot be answered, unless the run leaves bad rows out."""
    if reader.template is None and config.has_conversations:
        return None
    files = prompt_files(path, FIELD, config.data.train[0], config.data.system)
    if files is None or (reader.template is None and files.holds_texts):
        return None
    prompts, bad, broken = FilePrompts(reader.tokenizer), list[BadRow](), list[Problem]()
    for row in files.read(broken):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            messages, reference = split_at_reply(row)
            prompts.add(_ids(row, messages, reader, config), reference, row.where)
        except RowError as error:
            bad.append(BadRow(row.where, str(error)))
    _refuse(path, files, bad, broken, len(prompts), config)
    return prompts


def _ids(row: Conversation, messages: Sequence[Any], reader: LanguageReader, config: LanguageModel) -> tuple[int, ...]:
    if not messages:
        raise RowError("it begins with the reply: nothing is asked")
    if reader.template is None and len(messages) > 1:
        raise RowError(f"it has {len(messages)} messages before the answer, and the model has no chat template")
    return ids_of_prompt(messages, row.tools, reader, config)


def _refuse(
    path: str, files: PromptFiles, bad: Sequence[BadRow], broken: Sequence[Problem], good: int, config: LanguageModel
) -> None:
    rows = DataSet(files.name, good + len(bad), bad=bad)
    problems = [*broken, *bad_row_problems([rows], FIELD, config.data.bad_rows)]
    if problems:
        raise UserError(problems)
    if not good:
        raise problem(FIELD, f"{path} holds no prompt", "give a prompt a line, or rows with a prompt each")
