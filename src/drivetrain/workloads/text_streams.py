"""Classifies texts of a stream: rows are read and tokenised when they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.workload import TextClassification, TextData
from drivetrain.data.array_store import default_root
from drivetrain.data.bad_rows import BadRow, too_many
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.streams.mixture import Mix, StreamedMixture
from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.data.streams.shard_rows import open_shards
from drivetrain.data.streams.shards import Piece
from drivetrain.data.texts import is_on_hub
from drivetrain.data.tokenised import tokenise_block
from drivetrain.errors import Problem, UserError, problem

TRAIN = "workload.data.train"
IGNORED = -100  # a label that counts for nothing, as PyTorch's cross_entropy has it
LOOKED_AT = 256  # first rows, whose faults are seen before training

TextSample = tuple[np.ndarray, np.ndarray | None, int]


def stream_problems(config: TextClassification) -> Iterator[Problem]:
    """Yields problems of settings for which a stream of texts would have to be read whole."""
    data = config.data
    if is_on_hub(data.train):
        why = f"{data.train} is no file or folder here, and of the hub's data sets rows of texts are not streamed"
        yield Problem(TRAIN, why, "download its files and give their folder, or give stream: false")
    if data.evaluation is None:
        why = "a stream holds nothing out, and best checkpoints are chosen by evaluation data"
        yield Problem("workload.data.evaluation", why, "give evaluation data, which are read whole")
    if config.loss.class_weights is not None:
        why = "weights are scaled by how many samples each class has, and a stream is not counted"
        yield Problem("workload.loss.class_weights", why, "leave them out, or give stream: false")
    if data.limit_train is not None:
        why = "samples are drawn in the classes' proportions, which a stream does not know"
        yield Problem("workload.data.limit_train", why, "give loop.steps, or stream: false")
    for name in ("text_column", "text_pair_column", "label_column"):
        if isinstance(given := getattr(data, name), int):
            yield Problem(f"workload.data.{name}", f"rows of a stream have names for columns, not {given}", "name it")


@dataclass(frozen=True)
class TextStream:
    """Turns rows into (ids, segments or None, class number)."""

    data: TextData
    classes: Sequence[str]
    tokenizer: Any

    def samples(self, seed: int) -> StreamedMixture:
        """Returns samples. Raises UserError for shards that cannot be read, and for more unusable rows among the first
        ones than `bad_rows` allows."""
        rows = open_shards(self.data.train, TRAIN, self.data.cache or default_root())
        self._check_beginning(rows.found(0, LOOKED_AT))
        identity = repr((rows.identity, self.data.stream_buffer))
        shuffled = rows.shuffled(0, None, self.data.stream_buffer, [seed, 0])
        stream = StreamedRows(self.data.train, shuffled, self._made, self._unusable, identity)
        return StreamedMixture([stream], Mix())

    def _check_beginning(self, found: Sequence[tuple[Piece, int]]) -> None:
        rows: list[tuple[Mapping[str, Any], str]] = []
        bad: list[BadRow] = []
        for piece, index in found:
            where = piece.where(index)
            try:
                rows.append((piece.row(index), where))
            except RowError as error:
                bad.append(BadRow(where, str(error)))
        for name in ("text_column", "text_pair_column", "label_column"):
            column = getattr(self.data, name)
            if column is not None and rows and not any(column in row for row, _ in rows):
                known = ", ".join(dict.fromkeys(key for row, _ in rows for key in row))
                raise problem(f"workload.data.{name}", f"no row has a column {column!r}", f"they have: {known}")
        for row, where in rows:
            try:
                self._label(row, where)
            except RowError as error:
                bad.append(BadRow(where, str(error)))
        name, most = f"the beginning of {self.data.train}", most_dropped(self.data.bad_rows)
        if problems := too_many(name, bad, len(found), most, TRAIN):
            raise UserError(problems)

    def _made(self, row: Mapping[str, Any], where: str) -> TextSample:
        data = self.data
        first = _text(row.get(str(data.text_column)))
        if not first.strip():
            raise RowError("it has no text")
        second = None if data.text_pair_column is None else [_text(row.get(str(data.text_pair_column)))]
        tokens = tokenise_block(self.tokenizer, [first], second, data.max_length)
        return tokens.ids, tokens.segments, self._label(row, where)

    def _label(self, row: Mapping[str, Any], where: str) -> int:
        """Returns a row's class. Raises UserError for an unknown class; RowError for a row without a text, whose label
        is not needed, or without a label."""
        if not _text(row.get(str(self.data.text_column))).strip():
            raise RowError("it has no text")
        label = _text(row.get(str(self.data.label_column)))
        if not label.strip():
            raise RowError("it has no label")
        if label not in self.classes:
            known = ", ".join(self.classes[:20])
            why = f"{where} has the label {label!r}, which is none of {known}"
            raise problem("workload.data.label_column", why, "name all of them: workload.data.classes")
        return list(self.classes).index(label)

    def _unusable(self, where: str, why: str) -> TextSample:
        """Returns a sample that does not count: leaving it out would renumber those after it."""
        if self.data.bad_rows == "error":
            raise UserError([Problem(TRAIN, f"{where}: {why}", "correct or remove the row, or give bad_rows: drop")])
        tokens = tokenise_block(self.tokenizer, ["-"], None if self.data.text_pair_column is None else ["-"], 8)
        return tokens.ids, tokens.segments, IGNORED


def _text(value: Any) -> str:
    """Returns a text. Missing values are empty; whole floats that pandas or Arrow made of integers are integers
    again."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
