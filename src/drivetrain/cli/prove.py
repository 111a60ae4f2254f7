"""The verb prove: the promises on a run of the user's own, PASS or FAIL."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import Overrides, RunFile, TrustOption, run_file_here
from drivetrain.cli.console import errors, output, print_notices


def prove(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to compare.")] = 10,
    trust: TrustOption = False,
) -> None:
    """Compare a few steps of your own run on its engine with one process: PASS or FAIL a promise. Nothing is kept."""
    from drivetrain.cli import prove_run
    from drivetrain.cli.run_table import verdicts_table
    from drivetrain.launch.prepare import checked

    ready = checked(run_file_here(run_file), overrides or [], trust=trust)
    print_notices(ready.notices)
    proof = prove_run.prove(ready.run, steps, lambda line: errors.print(f"[dim]{escape(line)}[/]"))
    output.print(verdicts_table([(each.promise, each.holds, each.why) for each in proof.verdicts]))
    print_notices(proof.remarks)
    raise typer.Exit(0 if proof.holds else 1)
