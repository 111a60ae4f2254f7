"""The data sets of a language model: where each is, what its rows hold, and which of them are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from drivetrain.config.language import DataSource, LanguageData
from drivetrain.data.language.conversation_form import Form, RowError
from drivetrain.data.language.conversation_formats import (
    BadRow,
    check_columns,
    check_names,
    guess_formatting,
    read_conversation,
    read_conversations,
)
from drivetrain.data.language.conversations import Conversation
from drivetrain.data.language.registry import Entry, find, read_registry
from drivetrain.data.rows import Rows, open_rows
from drivetrain.errors import Problem, UserError, problem, together

T = TypeVar("T")
LOOKED_AT = 20  # first rows, from which a format is guessed
AT_ONCE = 1_000  # rows read together
SHOWN = 5


@dataclass(frozen=True)
class Text:
    """A document. where: file and row."""

    content: str
    where: str


@dataclass(frozen=True)
class DataSet:
    """One source, read. rows: all that it has; bad: those that cannot be used; what is left is either kind."""

    name: str
    rows: int
    texts: list[Text] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    weight: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenSet:
    """One source, found and opened, and how its rows are read. form: None for texts."""

    name: str
    source: DataSource
    rows: Rows
    form: Form | None
    text_column: str = "text"
    samples: int | None = None

    def text(self, row: Mapping[str, Any], index: int) -> Text:
        """RowError for a row without one."""
        content = row.get(self.text_column)
        if not isinstance(content, str) or not content.strip():
            kind = "no text" if content is None or isinstance(content, str) else f"a {type(content).__name__}"
            raise RowError(f"it has {kind} in the column {self.text_column!r}")
        return Text(content, self.rows.where(index))

    def conversation(self, row: Mapping[str, Any], index: int) -> Conversation:
        """RowError for a row that is none."""
        assert self.form is not None
        return read_conversation(row, self.form, self.rows.where(index), self.source.replace)


def open_sets(sources: Sequence[DataSource], data: LanguageData, chats: bool, field: str) -> list[OpenSet]:
    """chats: whether rows are conversations. UserError with all that is wrong with any of the sources."""
    registry: Mapping[str, Entry] = {}
    if data.registry is not None:
        registry = read_registry(str(data.registry), "workload.data.registry")
    return together([_opening(source, registry, data.stream, chats, field) for source in sources])


def read_set(opened: OpenSet, seed: int, field: str) -> DataSet:
    """All its rows, or `samples` of them drawn at random, in their order."""
    name, rows, source = opened.name, opened.rows, opened.source
    if opened.form is None:
        texts, bad = _texts(opened)
        return DataSet(name, len(rows), _drawn(texts, opened.samples, seed), [], bad, source.weight)
    read = read_conversations(rows, opened.form, field, source.replace)
    notes = (f"{name} holds preferences: the chosen answers are trained on",) if opened.form.ranking else ()
    kept = _drawn(read.conversations, opened.samples, seed)
    return DataSet(name, len(rows), [], kept, read.problems, source.weight, notes)


def refuse_bad_rows(sets: Sequence[DataSet], field: str) -> None:
    """UserError that names the first bad rows of each set, and how many more there are."""
    problems = []
    for each in sets:
        problems += [Problem(field, f"{bad.where}: {bad.why}", "correct or remove the row") for bad in each.bad[:SHOWN]]
        if len(each.bad) > SHOWN:
            why = f"and {len(each.bad) - SHOWN} more of the {each.rows} rows of {each.name} cannot be used"
            problems.append(Problem(field, why, "workload.data.bad_rows=drop leaves them out"))
    if problems:
        raise UserError(problems)


# --- one source ------------------------------------------------------------------------------------------------------


def _opening(
    source: DataSource, registry: Mapping[str, Entry], stream: bool, chats: bool, field: str
) -> Callable[[], OpenSet]:
    def opening() -> OpenSet:
        entry = _entry(source, registry, field)
        rows = open_rows(
            source.path if entry is None else entry.path,
            field,
            subset=source.subset or (entry.subset if entry else None),
            split=source.split if entry is None or source.split != "train" else entry.split,
            folder=source.folder or (entry.folder if entry else None),
            stream=stream,
        )
        name = Path(source.path).name
        samples = source.samples or (entry.num_samples if entry else None)
        if not chats:
            return OpenSet(name, source, rows, None, _text_column(source, entry, rows, field), samples)
        form = _form(source, entry, rows, field)
        if stream:
            check_names(form, source.replace, field)
            check_columns(form, list(_keys(rows)), field)
        return OpenSet(name, source, rows, form, samples=samples)

    return opening


def _entry(source: DataSource, registry: Mapping[str, Entry], field: str) -> Entry | None:
    """The registry's, unless there is a file or folder of that name."""
    if not registry or (source.path not in registry and Path(source.path).expanduser().exists()):
        return None
    return find(registry, source.path, field)


def _form(source: DataSource, entry: Entry | None, rows: Rows, field: str) -> Form:
    if source.formatting == "text":
        raise problem(field, f"{source.path} holds texts, no conversations", "give workload.stage=pretrain")
    columns = {**(entry.columns if entry else {}), **source.columns}
    tags = {**(entry.tags if entry else {}), **source.tags}
    if source.formatting != "auto":
        return Form(source.formatting, columns, tags, entry is not None and entry.ranking)
    if entry is not None:
        return Form(entry.formatting, columns, tags, entry.ranking)
    return guess_formatting(rows.read(0, LOOKED_AT), field, source.path, columns, tags)


def _text_column(source: DataSource, entry: Entry | None, rows: Rows, field: str) -> str:
    """LLaMA-Factory calls it the prompt."""
    if source.formatting not in ("auto", "text"):
        why = f"{source.path} holds conversations ({source.formatting}), no texts"
        raise problem(field, why, "give workload.stage=sft")
    if source.replace:
        raise problem(field, f"{source.path} holds texts, in which nothing is replaced", "leave replace out")
    columns = {**(entry.columns if entry else {}), **source.columns}
    unknown = sorted(columns.keys() - {"text", "prompt"})
    if unknown:
        raise problem(field, f"{source.path}: texts have no column {unknown[0]}", "give columns: {text: its name}")
    column = columns.get("text") or columns.get("prompt") or "text"
    keys = _keys(rows)
    if column not in keys:
        why = f"no row of {source.path} has the column {column!r}; there are {', '.join(keys) or 'none'}"
        raise problem(field, why, "give columns: {text: its name}, or workload.stage=sft if these are conversations")
    return column


def _keys(rows: Rows) -> dict[str, None]:
    return dict.fromkeys(key for row in rows.read(0, LOOKED_AT) for key in row)


def _texts(opened: OpenSet) -> tuple[list[Text], list[BadRow]]:
    texts, bad = [], []
    for start in range(0, len(opened.rows), AT_ONCE):
        for index, row in enumerate(opened.rows.read(start, start + AT_ONCE), start):
            try:
                texts.append(opened.text(row, index))
            except RowError as error:
                bad.append(BadRow(opened.rows.where(index), str(error)))
    return texts, bad


def _drawn(items: list[T], count: int | None, seed: int) -> list[T]:
    if count is None or count >= len(items):
        return items
    return [items[index] for index in np.sort(np.random.default_rng(seed).permutation(len(items))[:count])]
