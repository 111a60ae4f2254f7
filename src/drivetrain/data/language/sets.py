"""Opens the data sets of a language model: finds each, reads its rows, and chooses which of them are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from drivetrain.config.bad_rows import BadRows, most_dropped
from drivetrain.config.language_data import DataSource, LanguageData
from drivetrain.config.language_stages import SampleKind
from drivetrain.data.array_store import default_root
from drivetrain.data.bad_rows import BadRow, allowance, exceeds, too_many
from drivetrain.data.data_files import is_pattern, is_there
from drivetrain.data.json_rows import BrokenRows
from drivetrain.data.language.conversation_formats import (
    check_columns,
    check_names,
    read_conversation,
    read_conversations,
)
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.documents import Text, stored_texts
from drivetrain.data.language.preference_rows import Preferences, preference_problem, preferences_in
from drivetrain.data.language.registry import Entry, find, read_registry
from drivetrain.data.language.row_forms import LOOKED_AT, form_of, keys_of, text_column_of
from drivetrain.data.language.row_schema import RowError, RowSchema, check_utf8, kind
from drivetrain.data.language.stored_conversations import stored_conversations
from drivetrain.data.language.stored_rows import of_rows, row_starts, taken
from drivetrain.data.long_text import LongText
from drivetrain.data.row_blocks import BlockRows, RowFile
from drivetrain.data.rows import HubPart, Rows, large_files, open_rows, refuse_hub_choices
from drivetrain.data.streams.shard_rows import ShardRows, open_shards
from drivetrain.data.streams.shards import RowsShard
from drivetrain.data.tables import may_be_hub_id
from drivetrain.errors import Problem, UserError, together

T = TypeVar("T")
AT_ONCE = 1_000  # rows read together
SHOWN = 5


@dataclass(frozen=True)
class DataSet:
    """One source, read. rows: the number of all rows; bad: the unusable ones; the others are texts or conversations.

    starts: the first conversation of each usable row, and the number of all; None: each row is one. makes_pairs:
    whether rows hold several answers with a score each.
    """

    name: str
    rows: int
    texts: Sequence[Text] = ()
    conversations: Sequence[Conversation] = ()
    bad: Sequence[BadRow] = ()
    warning: str | None = None  # where what was read cannot be kept on disk
    starts: np.ndarray | None = None
    makes_pairs: bool = False
    preferences: Preferences | None = None  # what rows hold where they are read as single replies, and some cannot be

    def of_rows(self, numbers: np.ndarray) -> Sequence[Conversation]:
        """Returns the conversations of usable rows, all those of a row together."""
        return taken(self.conversations, numbers if self.starts is None else of_rows(self.starts, numbers))

    @property
    def usable(self) -> int:
        """Returns the number of rows that are conversations."""
        return len(self.conversations) if self.starts is None else len(self.starts) - 1


@dataclass(frozen=True)
class OpenSet:
    """One source, found and opened, with the schema of its rows. form: None for texts.

    files: of a large set, whose rows are kept on disk; none of others. cache: where.
    """

    name: str
    source: DataSource
    rows: Rows
    form: RowSchema | None
    text_column: str = "text"
    samples: int | None = None
    unseen: Sequence[str] = ()  # named columns that the first rows of a stream lack
    files: Sequence[RowFile] = ()
    cache: Path | None = None

    @property
    def root(self) -> Path:
        return self.cache or default_root()

    @property
    def notes(self) -> list[str]:
        return [f"none of the first {LOOKED_AT} rows of {self.name} has the column {each!r}" for each in self.unseen]

    @property
    def reads_chosen(self) -> bool:
        """Returns whether of rows with a chosen and a rejected answer the chosen one is read as the reply."""
        form = self.form
        return form is not None and form.ranking and not (form.pairs or form.labels or form.steps)

    def preferences(self) -> Preferences | None:
        """Returns what the rows hold if they are read as single replies and are none."""
        form = self.form
        if form is None or form.ranking or form.labels or form.steps:
            return None
        return preferences_in(self.rows.read(0, LOOKED_AT))

    @property
    def makes_pairs(self) -> bool:
        """Returns whether rows hold several answers with a score each."""
        return self.form is not None and self.form.scored

    def drawn(self, items: Sequence[T], seed: int, starts: np.ndarray | None = None) -> Sequence[T]:
        """Returns those of `samples` rows drawn at random, in their order, or all. starts: as a `DataSet` has them."""
        rows = len(items) if starts is None else len(starts) - 1
        if self.samples is None or self.samples >= rows:
            return items
        numbers = np.sort(np.random.default_rng(seed).permutation(rows)[: self.samples])
        return taken(items, numbers if starts is None else of_rows(starts, numbers))

    def starts(self, items: Sequence[Conversation]) -> np.ndarray | None:
        """Returns the first item of each row, and the number of all; None where each row is one."""
        return row_starts(items) if self.form is not None and self.form.every_pair else None

    def read(self, items: Sequence[Conversation], rows: int, seed: int, bad: Sequence[BadRow]) -> DataSet:
        """Returns the set of these conversations, `samples` rows of them. rows: the number of all."""
        drawn = self.drawn(items, seed, self.starts(items))
        found = DataSet(self.name, rows, conversations=drawn, bad=bad, starts=self.starts(drawn))
        return replace(found, makes_pairs=self.makes_pairs, preferences=self.preferences() if bad else None)

    def texts(self, indices: Sequence[int]) -> tuple[dict[int, Text], list[BadRow]]:
        """Returns row number → its text, for the rows with these numbers, and the rows without one."""
        return self._read(self.text, indices)

    def conversations(self, indices: Sequence[int]) -> tuple[dict[int, Conversation], list[BadRow]]:
        """Returns the same for conversations."""
        return self._read(self.conversation, indices)

    def _read(
        self, read: Callable[[Mapping[str, Any], int], T], indices: Sequence[int]
    ) -> tuple[dict[int, T], list[BadRow]]:
        found: dict[int, T] = {}
        bad: list[BadRow] = []
        for each in [indices] if isinstance(indices, range) else [range(index, index + 1) for index in indices]:
            for index, row in zip(each, self.rows.read(each.start, each.stop), strict=True):
                try:
                    found[index] = read(row, index)
                except RowError as error:
                    bad.append(BadRow(self.rows.where(index), str(error)))
        return found, bad

    def text(self, row: Mapping[str, Any], index: int) -> Text:
        """Returns a row's text. Raises RowError for a row without one."""
        return self.text_at(row, self.rows.where(index))

    def text_at(self, row: Mapping[str, Any], where: str) -> Text:
        """Returns a row's text. where: the row's place, for errors."""
        content = row.get(self.text_column)
        if isinstance(content, LongText):
            if not content.has_text:
                raise RowError("it has no text")
            return Text(content, where)
        if not isinstance(content, str) or not content.strip():
            found = "no text" if content is None or isinstance(content, str) else f"{kind(content)}, not a text,"
            raise RowError(f"it has {found} in the column {self.text_column!r}")
        check_utf8(content, f"the column {self.text_column!r}")
        return Text(content, where)

    def conversation(self, row: Mapping[str, Any], index: int) -> Conversation:
        """Returns a row's conversation. Raises RowError for a row that is none."""
        return self.conversation_at(row, self.rows.where(index))

    def conversation_at(self, row: Mapping[str, Any], where: str) -> Conversation:
        """Returns a row's conversation. where: the row's place, for errors."""
        assert self.form is not None
        return read_conversation(row, self.form, where, self.source.replace)


def open_sets(
    sources: Sequence[DataSource],
    data: LanguageData,
    kind: SampleKind,
    field: str,
    broken: list[Problem] | None = None,
    margins: bool = False,
) -> list[OpenSet]:
    """Opens all sources, whose rows hold samples of that kind. Raises UserError with all problems of all sources.

    broken: collects problems of single rows that cannot be read, so that they are reported with others. None: they are
    errors too. margins: whether the pairs' margins are read.
    """
    registry: Mapping[str, Entry] = {}
    if data.registry is not None:
        registry = read_registry(str(data.registry), "workload.data.registry")
    opened = together([partial(_opened, source, registry, data, kind, field, broken) for source in sources])
    return [
        replace(each, form=replace(each.form, margins=True)) if margins and each.form is not None else each
        for each in opened
    ]


def read_set(opened: OpenSet, seed: int, field: str) -> DataSet:
    """Reads all rows of a set, or so many of the usable ones."""
    name, rows, source = opened.name, opened.rows, opened.source
    if opened.form is None:
        if opened.files:
            kept = stored_texts(opened.files, opened.text_column, opened.text_at, opened.root)
            drawn = opened.drawn(kept.items, seed)
            return DataSet(name, kept.rows, drawn, bad=kept.problems, warning=kept.warning)
        texts, bad = _texts(opened)
        return DataSet(name, len(rows), opened.drawn(texts, seed), bad=bad)
    if opened.files:
        talks = stored_conversations(opened.files, opened.form, field, source.replace, opened.root)
        return replace(opened.read(talks.items, talks.rows, seed, talks.problems), warning=talks.warning)
    read = read_conversations(rows, opened.form, field, source.replace)
    return opened.read(read.conversations, len(rows), seed, read.problems)


def refuse_bad_rows(sets: Sequence[DataSet], field: str, bad_rows: BadRows = "error") -> None:
    """Raises UserError for bad rows that must not be left out, with the problems of `bad_row_problems`."""
    problems = bad_row_problems(sets, field, bad_rows)
    if problems:
        raise UserError(problems)


def bad_row_problems(sets: Sequence[DataSet], field: str, bad_rows: BadRows = "error") -> list[Problem]:
    """Returns the first bad rows of each set, and how many more there are. Where rows may be left out, returns sets
    that would lose too many, and why. Of a set of preferences that is read as single replies, returns that alone."""
    most = most_dropped(bad_rows)
    problems = []
    for each in sets:
        if each.preferences is not None and exceeds(len(each.bad), each.rows, most):
            problems.append(preference_problem(each.name, each.preferences, field))
            continue
        if bad_rows != "error":
            problems += too_many(each.name, each.bad, each.rows, most, field)
            continue
        fix = f"correct or remove the row, or {allowance(len(each.bad), each.rows)}"
        problems += [Problem(field, f"{bad.where}: {bad.why}", fix) for bad in each.bad[:SHOWN]]
        if len(each.bad) > SHOWN:
            why = f"and {len(each.bad) - SHOWN} more of the {each.rows} rows of {each.name} cannot be used"
            problems.append(Problem(field, why, fix))
    return problems


# --- one source ------------------------------------------------------------------------------------------------------


def _opened(
    source: DataSource,
    registry: Mapping[str, Entry],
    data: LanguageData,
    kind: SampleKind,
    field: str,
    broken: list[Problem] | None,
) -> OpenSet:
    entry = _entry(source, registry, field)
    path = source.path if entry is None else entry.path
    files = [] if data.stream else large_files(path, field, data.documents)
    if files or (data.stream and is_there(path)):  # opening others sees to it
        refuse_hub_choices(path, field, **_part_of_hub(source, entry))
    try:
        if data.stream:
            rows: Rows = _streamed(source, entry, field, data)
        else:
            rows = BlockRows(files) if files else _rows(source, entry, field, data)
    except BrokenRows as error:
        if broken is None:
            raise
        broken += error.problems
        rows = error.rows
    name = source.path if is_pattern(source.path) else Path(source.path).name
    asked = [count for count in (source.samples, entry.num_samples if entry else None) if count is not None]
    samples = min(asked, default=None)
    if kind == "texts":
        column = text_column_of(source, entry, rows, field)
        return OpenSet(name, source, rows, None, column, samples, files=files, cache=data.cache)
    form = form_of(source, entry, rows, field, kind)
    form = replace(form, default_system=data.system, every_pair=form.scored and data.pairs == "all")
    unseen: list[str] = []
    if data.stream:
        check_names(form, source.replace, field)
        unseen = check_columns(form, list(keys_of(rows)), field, form.required)
    return OpenSet(name, source, rows, form, samples=samples, unseen=unseen, files=files, cache=data.cache)


def _rows(source: DataSource, entry: Entry | None, field: str, data: LanguageData) -> Rows:
    return open_rows(
        source.path if entry is None else entry.path,
        field,
        **_part_of_hub(source, entry),
        stream=data.stream,
        documents=data.documents,
    )


def _part_of_hub(source: DataSource, entry: Entry | None) -> HubPart:
    return {
        "subset": source.subset or (entry.subset if entry else None),
        "split": source.split if entry is None or source.split != "train" else entry.split,
        "folder": source.folder or (entry.folder if entry else None),
    }


def _streamed(source: DataSource, entry: Entry | None, field: str, data: LanguageData) -> ShardRows:
    path, root = source.path if entry is None else entry.path, data.cache or default_root()
    if is_there(path) or not may_be_hub_id(path):
        return open_shards(path, field, root)
    return ShardRows([RowsShard(_rows(source, entry, field, data), path)], root)


def _entry(source: DataSource, registry: Mapping[str, Entry], field: str) -> Entry | None:
    """Returns the registry's entry, unless there is a file or folder of that name, or it can only be a hub id:
    "owner/name"."""
    elsewhere = is_there(source.path) or ("/" in source.path and may_be_hub_id(source.path))
    if not registry or (source.path not in registry and elsewhere):
        return None
    return find(registry, source.path, field)


def _texts(opened: OpenSet) -> tuple[list[Text], list[BadRow]]:
    """Returns all texts, some of them at a time."""
    rows = range(len(opened.rows))
    parts = [opened.texts(rows[start : start + AT_ONCE]) for start in range(0, len(rows), AT_ONCE)]
    return [text for texts, _ in parts for text in texts.values()], [row for _, bad in parts for row in bad]
