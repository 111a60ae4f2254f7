"""The verb import: makes a run file of another software's configuration, and lists what became of its keys."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import here, path_argument, path_option, run_file_here
from drivetrain.cli.console import errors, output

if TYPE_CHECKING:
    from drivetrain.importing.verb import Imported


def import_(
    files: Annotated[list[Path], path_argument(metavar="FILE", help="Configurations that belong together.")],
    onto: Annotated[
        Path | None,
        path_option(metavar="RUN.YAML", help="Run file with the workload, and with settings that FILE lacks."),
    ] = None,
    to: Annotated[Path | None, path_option("--output", "-o", help="Run file; left out, <first file>-run.yaml.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Drop this key although something else is trained without it; repeat it."),
    ] = None,
) -> None:
    """Make a run file of another software's configuration, and list what became of each of its keys.

    Exit codes: 0 the run file is complete, 1 it was written but cannot train yet, 2 nothing was written.
    """
    from drivetrain.cli.run_table import show_notes
    from drivetrain.importing.llama_commands import RUN
    from drivetrain.importing.verb import import_files

    read = [here(file, field="FILE") for file in files]
    below = None if onto is None else run_file_here(onto, "--onto")
    imported = import_files(read, below, to, overwrite, without or ())
    show_notes(imported.notes, output)
    _print_lacking(imported)
    if imported.output is None:
        errors.print("nothing is trained, so there is no run file", soft_wrap=True)
    else:
        errors.print(f"run file in {escape(str(imported.output))}", soft_wrap=True)
    for command in imported.commands:
        output.print(escape(command), soft_wrap=True)
    if any(f" {RUN} " in command for command in imported.commands):
        text = f"{RUN}: the folder of a run; one goes on with an adapter of LLaMA-Factory's by adapter.path"
        errors.print(f"[yellow]note[/] {text}", soft_wrap=True)
    if imported.missing or imported.problems:
        raise typer.Exit(1)
    if imported.output is not None:
        errors.print(f"next: drivetrain train {escape(shlex.quote(str(imported.output)))}", soft_wrap=True)


def _print_lacking(imported: Imported) -> None:
    """Prints what the run file lacks, what no machine takes of it, and what this one does not take."""
    if imported.missing:
        lacking = f"[bold yellow]missing[/] {', '.join(imported.missing)}"
        cure = "write it in, or import with --onto RUN.YAML"
        errors.print(f"{lacking}: the run file is incomplete and cannot train; {cure}", soft_wrap=True)
    for found in imported.problems:
        text = escape(f"{found.field}: {found.why}; {found.fix}")
        errors.print(f"[bold yellow]cannot train yet[/] {text}", soft_wrap=True)
    if imported.run is None:
        return
    from drivetrain.config import rules
    from drivetrain.config.resolve import resolved
    from drivetrain.runtime.hardware import detect

    machine = detect(imported.run.device)
    known = {found.field for found in imported.problems}
    for found in rules.check(resolved(imported.run, machine), machine):
        if found.field not in known:
            text = f"on this machine: {found.field}: {found.why}; {found.fix}"
            errors.print(f"[yellow]note[/] {escape(text)}")
