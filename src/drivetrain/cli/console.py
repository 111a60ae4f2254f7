"""The screens that verbs print on: results go to stdout, notes and problems to stderr."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

FILE_COLUMNS = 200  # of a table in a file or a pipe, which have no width

errors = Console(stderr=True, highlight=False)
output = Console(highlight=False)


def wide(console: Console) -> Console:
    """Returns the console, or one of FILE_COLUMNS columns where it is no terminal."""
    return console if console.is_terminal else Console(highlight=False, width=FILE_COLUMNS)


def print_notices(notices: Sequence[str]) -> None:
    """Prints notes beside the result, a line each."""
    for notice in notices:
        errors.print(f"[yellow]note[/] {escape(notice)}")
