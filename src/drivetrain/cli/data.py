"""The verb data: what is in a run's data."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.arguments import Overrides, RunFile, TrustOption, run_file_here
from drivetrain.cli.console import output, print_notices, wide


def data(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Show so many samples, as they are trained on.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first of them, from 0.")] = 0,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Those of the evaluation data.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with what runs read before.")] = False,
    trust: TrustOption = False,
) -> None:
    """Show what is in the data: rows, what becomes of them, lengths, padding, a sample with its trained tokens
    marked."""
    from drivetrain.cli.data_examination import Wanted, examine, show_verified
    from drivetrain.cli.data_report import show
    from drivetrain.config.load import replaced
    from drivetrain.data.remote_sources import fetched
    from drivetrain.launch.prepare import checked

    file = run_file_here(run_file)
    ready = checked(file, overrides or [], trust=trust, model_files=False)  # the report says what train refuses
    if not ready.is_first:
        return
    print_notices(replaced(file, overrides or []))
    run = fetched(ready.run)
    if verify:
        raise typer.Exit(show_verified(run, output, as_json))
    report, warnings = examine(run, Wanted(rows, first, evaluation) if rows else None)
    print_notices(warnings)
    show(report, wide(output), as_json)
