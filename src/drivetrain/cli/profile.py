"""The verb profile: where the time of a step goes, and what to try next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import Overrides, RunFile, TrustOption, path_option, run_file_here
from drivetrain.cli.console import errors, output, print_notices, wide
from drivetrain.runtime.strict_json import dumps

TRIES = 3


def profile(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps to profile.")] = 5,
    tries: Annotated[bool, typer.Option("--try", help=f"Measure the first {TRIES} suggestions.")] = False,
    to: Annotated[
        Path | None, path_option("--output", "-o", help="Folder for page and traces; default: profiles/NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: TrustOption = False,
) -> None:
    """Take a few steps and show where their time goes: by part, module and kernel. Nothing is saved of the training."""
    from drivetrain.cli import profile_run
    from drivetrain.cli.profile_table import render
    from drivetrain.profile.page import write_page
    from drivetrain.runtime.atomic_file import writing

    folder = to or Path("profiles") / run_file.stem
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found = profile_run.profile(
        run_file_here(run_file),
        overrides or [],
        steps,
        folder.resolve(),
        TRIES if tries else 0,
        trust,
        lambda line: errors.print(f"[dim]{escape(line)}[/]"),
    )
    if not found.of_first:
        return
    write_page(found.as_object(), found.timeline, folder, run_file.stem)
    print_notices(found.notes)
    if as_json:
        typer.echo(dumps(found.as_object(), indent=2))
    else:
        wide(output).print(render(found))
        output.print(f"page: {escape(str(folder / 'profile.html'))}; traces for Perfetto beside it", soft_wrap=True)
