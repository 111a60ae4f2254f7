"""The verb report: runs and comparisons of different times, side by side; or one run as a page of a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape

from drivetrain.cli.arguments import path_argument, path_option
from drivetrain.cli.console import errors, output, wide


def report(
    folders: Annotated[list[Path], path_argument(metavar="FOLDER", help="Folders of runs and of comparisons.")],
    to: Annotated[
        Path | None,
        path_option(
            "--output",
            "-o",
            help="Folder for page, tables and plots; or FILE.html: one run as a single page, if it failed too.",
        ),
    ] = None,
) -> None:
    """Put runs and comparisons of different times side by side, or write one run as a page."""
    if to is not None and to.suffix == ".html":
        _write_page(folders, to)
        return
    from drivetrain.compare import verbs
    from drivetrain.compare.table import comparison_table
    from drivetrain.inference.remote_places import here

    comparison = verbs.report([here(folder, []) for folder in folders])
    console = wide(output)
    console.print(comparison_table(comparison, console))
    if to is not None:
        verbs.write_report(comparison, to)
        errors.print(f"page, tables and plots in {escape(str(to))}", soft_wrap=True)


def _write_page(folders: list[Path], to: Path) -> None:
    """Writes one run as a single file. Raises UserError for several runs, and RunError if there is no room."""
    from drivetrain.errors import problem
    from drivetrain.inference.remote_places import here
    from drivetrain.run_page.page import as_html
    from drivetrain.run_page.record import read
    from drivetrain.runtime.atomic_file import write_whole, writing

    if len(folders) > 1:
        why = f"{to} is one file, which holds one run, and {len(folders)} folders were given"
        raise problem("--output", why, "give one folder of a run, or a folder as --output")
    record = read(here(folders[0], []))
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, as_html(record))
    errors.print(f"{escape(record.name)}: {record.status.replace('_', ' ')}; page in {escape(str(to))}", soft_wrap=True)
