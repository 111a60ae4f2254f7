"""`drivetrain fields`: lists every key of a run file, its default and its meaning."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from drivetrain.config.engines import ENGINES, SHORT
from drivetrain.config.field_paths import owned_fields
from drivetrain.config.unknown import elsewhere_hint
from drivetrain.errors import problem

Row = tuple[str, str, str]
ONE_LINE = 2000  # characters: more than any row has


def fields(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORD", help="Only keys with a part that begins so, e.g. optimizer, lr."),
    ] = None,
) -> None:
    """List every key of a run file, its default and its meaning."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=ONE_LINE)  # a key a line, for grep
    table = fields_table(wanted or [])
    with console.pager(styles=True) if console.is_terminal and not wanted else nullcontext():
        console.print(table)


def fields_table(wanted: Sequence[str] = ()) -> Table:
    """Returns the keys of which a part begins with one of the words, or all.

    A key with other meanings in several blocks has a row of each.

    Raises UserError for a word with which no part begins.
    """
    table = Table(Column("key", no_wrap=True), "default", "what it means", box=None, pad_edge=False)
    rows = list(_rows())
    keys = [key for key, _, _ in rows]
    for word in wanted:
        if not any(_holds(key, word) for key in keys):
            raise problem(word, "no key of a run file, and no part of one, begins so", _meant(word, keys))
    for key, default, meaning in rows:
        if not wanted or any(_holds(key, word) for word in wanted):
            table.add_row(escape(key), escape(default), escape(meaning))
    return table


def _meant(word: str, keys: Sequence[str]) -> str:
    """Returns what the user may have looked for: an engine, a key by its name in other trainers, or a key that is
    near."""
    if word in ENGINES or word in SHORT:
        return f"it is an engine: write engine={word}; drivetrain fields engine lists the engines' keys"
    if found := elsewhere_hint(word):
        return found
    ends = sorted({key.rsplit(".", 1)[-1] for key in keys})
    near = difflib.get_close_matches(word.rsplit(".", 1)[-1], ends, n=1)
    return f"did you mean {near[0]}?" if near else "give the start of a key, or nothing for all of them"


def _holds(key: str, word: str) -> bool:
    """Returns whether one of the key's parts begins so."""
    return f".{word}" in f".{key}"


def _rows() -> list[Row]:
    """Returns (key, default, meaning). Blocks that share a key with one meaning share its row; others name
    themselves."""
    owners: dict[Row, list[str]] = {}
    for owner, path, info in owned_fields():
        owners.setdefault((".".join(path), _default(info), info.description or ""), []).append(owner)
    shared = {key for key, count in _counts(owners).items() if count > 1}
    rows = []
    for (key, default, meaning), names in owners.items():
        of = f" [{', '.join(dict.fromkeys(filter(None, names)))}]" if key in shared and any(names) else ""
        rows.append((key, default, meaning + of))
    return rows


def _counts(owners: dict[Row, list[str]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key, _, _ in owners:
        counts[key] = counts.get(key, 0) + 1
    return counts


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return "" if value is None or isinstance(value, BaseModel) else str(value)
