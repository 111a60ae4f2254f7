"""Samples of a data set that is read while it is trained on: one a row, tokenised in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.config.language import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.document_tokens import encoded
from drivetrain.data.language.samples import Sample, StreamedSamples
from drivetrain.data.language.sets import DataSet, OpenSet, refuse_bad_rows

AT_ONCE = 16  # of them: a text may be a book
LOOKED_AT = 256  # first rows of a stream, whose faults are seen before training


@dataclass(frozen=True)
class Stream:
    """rows: the numbers of those that are used. template: None for texts. field: for errors."""

    opened: OpenSet
    rows: Sequence[int]
    tokenizer: Any
    template: ChatTemplate | None
    data: LanguageData
    field: str

    @property
    def samples(self) -> StreamedSamples:
        return StreamedSamples(
            len(self.rows), self._read, self._name, self.data.stream_buffer, self.opened.goes_forward
        )

    def check_beginning(self) -> None:
        """UserError if the first rows that are used have some that cannot be, and these are not to be left out."""
        rows = self.rows[:LOOKED_AT]
        read = self._bad_texts if self.template is None else self._bad_conversations
        bad = [each for start in range(0, len(rows), AT_ONCE) for each in read(rows[start : start + AT_ONCE])]
        name = f"the beginning of {self.opened.name}"
        refuse_bad_rows([DataSet(name, len(rows), bad=bad)], self.field, self.data.bad_rows)

    def _bad_texts(self, rows: Sequence[int]) -> list[BadRow]:
        return self.opened.texts(rows)[1]

    def _bad_conversations(self, rows: Sequence[int]) -> list[BadRow]:
        assert self.template is not None
        conversations, bad = self.opened.conversations(rows)
        refused = self.template.refused(list(conversations.values()), self.data.train_on)
        return [*bad, *(BadRow(where, why) for where, why in refused)]

    def _name(self, index: int) -> str:
        return self.opened.rows.where(self.rows[index])

    def _read(self, start: int, stop: int) -> list[Sample]:
        """UserError for rows that cannot be used, where that is an error. Where it is none, such a row is a sample
        without targets: left out, it would give those after it other numbers."""
        rows, nothing = self.rows[start:stop], (np.zeros(2, np.int32), np.zeros(2, dtype=bool))
        samples, bad = self._texts(rows) if self.template is None else self._conversations(rows)
        if self.data.bad_rows == "error":
            refuse_bad_rows([DataSet(self.opened.name, len(self.opened.rows), bad=bad)], self.field)
        return [samples.get(row, nothing) for row in rows]

    def _texts(self, rows: Sequence[int]) -> tuple[dict[int, Sample], list[BadRow]]:
        texts, bad = self.opened.texts(rows)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        found = {}
        contents = [text.content for text in texts.values() if isinstance(text.content, str)]
        for row, ids in zip(texts, encoded(self.tokenizer, contents), strict=True):
            taken = np.array([*ids, *end][: self.data.length], dtype=np.int32)
            if len(taken) > 1:
                found[row] = taken, np.ones(len(taken), dtype=bool)
        return found, bad

    def _conversations(self, rows: Sequence[int]) -> tuple[dict[int, Sample], list[BadRow]]:
        """Of a template that rewrites history, the sample of the first reply."""
        conversations, bad = self.opened.conversations(rows)
        cut = self.cut(list(conversations.values()))
        loaded = {cut.samples.name(i): cut.samples.load(i, 0) for i in reversed(range(len(cut.samples)))}
        found = {row: loaded[each.where] for row, each in conversations.items() if each.where in loaded}
        return found, [*bad, *cut.bad]

    def cut(self, conversations: Sequence[Conversation]) -> Cut:
        assert self.template is not None
        return conversation_samples(conversations, self.template, self.tokenizer, self.data, keeps=False)
