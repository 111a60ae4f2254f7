"""The verb report: runs and comparisons of different times, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape

from drivetrain.cli.arguments import path_argument, path_option
from drivetrain.cli.console import errors, output, wide


def report(
    folders: Annotated[list[Path], path_argument(metavar="FOLDER", help="Folders of runs and of comparisons.")],
    to: Annotated[Path | None, path_option("--output", "-o", help="Folder for page, tables and plots.")] = None,
) -> None:
    """Put runs and comparisons of different times side by side."""
    from drivetrain.compare import verbs
    from drivetrain.compare.table import comparison_table
    from drivetrain.inference.remote_places import here

    comparison = verbs.report([here(folder, []) for folder in folders])
    console = wide(output)
    console.print(comparison_table(comparison, console))
    if to is not None:
        verbs.write_report(comparison, to)
        errors.print(f"page, tables and plots in {escape(str(to))}", soft_wrap=True)
