"""Finds preferences in a table, as `drivetrain init` does: pairs of answers, or labelled ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.config.language_data import DataSource
from drivetrain.data.language.conversation_formats import conversations_of
from drivetrain.data.language.preference_rows import Preferences, label_column, preferences_in
from drivetrain.data.language.row_forms import form_of
from drivetrain.data.language.row_schema import KTO_TAGS, PREFERENCE, RowError
from drivetrain.data.language.scored_rows import COMPLETIONS
from drivetrain.data.rows import Rows, open_rows
from drivetrain.errors import UserError
from drivetrain.init.data_kinds import ANSWERED, ASKED, ROWS, PreferenceRows, named, texts_within


def preferences_of(path: Path, columns: Sequence[str], number: int) -> PreferenceRows | None:
    """Returns the preferences in a table of so many rows, if the reader of these formats can read some of the first."""
    if not set(PREFERENCE) <= set(columns) and not {*KTO_TAGS, *COMPLETIONS} & set(columns):
        return None
    with suppress(UserError):  # such data are no preferences; what else they are, and are refused for, is seen later
        rows = open_rows(str(path), "--data")
        first = rows.read(0, ROWS)
        holds = preferences_in(first)
        if holds is None and _numbered_label(columns, first) is not None:
            holds = "labelled"
        for names in _namings(columns, first, holds) if holds is not None else ():
            if holds is not None and _readable(path, rows, first, names, holds):
                return PreferenceRows(str(path), holds, number, texts_within(first), names)
    return None


def _namings(columns: Sequence[str], first: Sequence[Any], holds: Preferences | None) -> Iterator[dict[str, str]]:
    """Yields names of columns: none, which leaves them to the reader, then those that are usual elsewhere."""
    label = (label_column(first) or _numbered_label(columns, first)) if holds == "labelled" else None
    tag = {"kto_tag": label} if label not in (None, "label") else {}
    yield tag
    asked, answered = named(columns, ASKED), named(columns, ANSWERED)
    system = {"system": "system"} if "system" in columns else {}
    if asked and holds == "pairs":
        yield {"prompt": asked, **system}
    elif asked and answered:
        yield {"prompt": asked, "response": answered, **system, **tag}


def _numbered_label(columns: Sequence[str], first: Sequence[Any]) -> str | None:
    """Returns the column that labels answers with 0 and 1 in place of false and true. None where a label may as well be
    a class: beside columns that are not clearly an answer and what it answers, with a third value, or without both."""
    if not ({"prompt", "instruction"} & {*columns} and {"completion", "response", "output"} & {*columns}):
        return None
    for name in KTO_TAGS:
        values = {str(row.get(name)).strip().removesuffix(".0") for row in first}
        if name in columns and values == {"0", "1"}:
            return name
    return None


def _readable(path: Path, rows: Rows, first: Sequence[Any], names: dict[str, str], holds: Preferences) -> bool:
    """Returns whether the reader can read one of the first rows under these names."""
    try:
        form = form_of(DataSource(path=str(path), columns=names), None, rows, "--data", holds)
    except UserError:
        return False
    for row in first:
        with suppress(RowError):
            if conversations_of(row, form, "", {}):
                return True
    return False
