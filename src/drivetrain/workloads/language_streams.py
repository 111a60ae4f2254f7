"""Streamed data sets of a language model: each row is a sample, tokenised when it is drawn."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.document_tokens import encoded
from drivetrain.data.language.documents import Text
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.language.samples import Sample
from drivetrain.data.language.sets import DataSet, OpenSet, refuse_bad_rows
from drivetrain.data.streams.rows_set import Row, StreamedRows
from drivetrain.data.streams.shard_rows import ShardRows

LOOKED_AT = 256  # first rows of a stream, whose faults are seen before training


@dataclass(frozen=True)
class Stream:
    """A streamed data set. template: None for texts. field: for errors."""

    opened: OpenSet
    tokenizer: Any
    template: ChatTemplate | None
    data: LanguageData
    field: str

    @property
    def rows(self) -> ShardRows:
        assert isinstance(self.opened.rows, ShardRows)
        return self.opened.rows

    @property
    def held_out(self) -> int:
        """The number of first rows that are evaluated on."""
        return 0 if self.field.endswith("evaluation") else self.data.evaluation_rows

    @property
    def stop(self) -> int | None:
        """The row behind the last that is used; None: the end."""
        return None if self.opened.samples is None else self.held_out + self.opened.samples

    def training(self, seed: int, number: int) -> StreamedRows:
        """Returns rows in a shuffled order. number: of the data set, each of which has an order of its own."""
        rows = self.rows.shuffled(self.held_out, self.stop, self.data.stream_buffer, [seed, number])
        identity = repr((self.rows.identity, self.held_out, self.stop, self.data.stream_buffer))
        return StreamedRows(self.opened.name, rows, self.sample, self._unusable, identity)

    def evaluation(self) -> StreamedRows:
        """Returns rows in the order of the files."""
        first = (0, self.held_out) if self.held_out else (0, self.stop)
        return StreamedRows(self.opened.name, self.rows.in_order(*first), self.sample, self._unusable)

    def beginning(self) -> tuple[list[Text], list[Conversation], list[BadRow]]:
        """Reads the first rows: those that can be used, and those that cannot."""
        stop = self.held_out + LOOKED_AT
        texts: list[Text] = []
        talks: list[Conversation] = []
        bad: list[BadRow] = []
        for piece, index in self.rows.found(self.held_out, stop if self.stop is None else min(stop, self.stop)):
            where = piece.where(index)
            try:
                row = piece.row(index)
                if self.template is None:
                    texts.append(self.opened.text_at(row, where))
                else:
                    talks.append(self.opened.conversation_at(row, where))
            except RowError as error:
                bad.append(BadRow(where, str(error)))
        return texts, talks, bad

    def held_talks(self, most: int) -> list[Conversation]:
        """Returns the first conversations of the evaluation data."""
        talks: list[Conversation] = []
        for piece, index in self.rows.found(0, most):
            with suppress(RowError):
                talks.append(self.opened.conversation_at(piece.row(index), piece.where(index)))
        return talks

    def check_beginning(self) -> None:
        """Raises UserError if the first rows in use include unusable ones that must not be left out."""
        texts, talks, bad = self.beginning()
        looked_at = len(texts) + len(talks) + len(bad)
        if self.template is not None:
            bad += [BadRow(where, why) for where, why in self.template.refused(talks, self.data.train_on)]
        name = f"the beginning of {self.opened.name}"
        held = self.opened.preferences() if bad else None
        refuse_bad_rows([DataSet(name, looked_at, bad=bad, preferences=held)], self.field, self.data.bad_rows)

    def cut(self, conversations: list[Conversation]) -> Cut:
        assert self.template is not None
        return conversation_samples(conversations, self.template, self.tokenizer, self.data, keeps=False)

    def sample(self, row: Row, where: str) -> Sample:
        """Returns a row's sample. Raises RowError for a row that is none. Under a template that rewrites history, the
        sample of the first reply; a row that `length` leaves no target of has a sample without any."""
        if self.template is None:
            return self._of_text(self.opened.text_at(row, where))
        cut = self.cut([self.opened.conversation_at(row, where)])
        if cut.bad:
            raise RowError(cut.bad[0].why)
        return cut.samples.load(0, 0) if len(cut.samples) else _nothing()

    def _of_text(self, text: Text) -> Sample:
        assert isinstance(text.content, str)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        taken = np.array([*encoded(self.tokenizer, [text.content])[0], *end][: self.data.length], dtype=np.int32)
        return (taken, np.ones(len(taken), dtype=bool)) if len(taken) > 1 else _nothing()

    def _unusable(self, where: str, why: str) -> Sample:
        """Returns a sample without targets: leaving it out would renumber those after it."""
        if self.data.bad_rows == "error":
            refuse_bad_rows([DataSet(self.opened.name, 1, bad=[BadRow(where, why)])], self.field)
        return _nothing()


def _nothing() -> Sample:
    return np.zeros(2, np.int32), np.zeros(2, dtype=bool)
