"""The verb data: what is in a run's data."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.arguments import Overrides, RunFile, TrustOption
from drivetrain.cli.console import output, print_notices, wide


def data(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with what runs read before.")] = False,
    trust: TrustOption = False,
) -> None:
    """Show what is in the data: rows, what becomes of them, lengths, padding, a sample with its trained tokens
    marked."""
    from drivetrain.cli.data_examination import examine, show_verified
    from drivetrain.cli.data_report import show
    from drivetrain.launch.prepare import checked

    ready = checked(run_file, overrides or [], trust=trust, model_files=False)  # the report says what train refuses
    if not ready.is_first:
        return
    if verify:
        raise typer.Exit(show_verified(ready.run, output, as_json))
    report, warnings = examine(ready.run)
    print_notices(warnings)
    show(report, wide(output), as_json)
