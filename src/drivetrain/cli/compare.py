"""The verb compare: a run file along several axes, a row a cell."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import RunFile, TrustOption, checkpoint_here, path_option, run_file_here
from drivetrain.cli.console import errors, output, wide


class Verb(StrEnum):
    train = "train"
    predict = "predict"


def compare(
    run_file: RunFile,
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,VALUE", help="Axes, e.g. precision=fp32,bf16-mixed; one value overrides."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, at seed, seed + 1, ...")] = 1,
    verb: Annotated[Verb, typer.Option(help="The work of each cell.")] = Verb.train,
    to: Annotated[Path | None, path_option("--output", "-o", help="Folder; left out, runs/<file>-compare.")] = None,
    cell_timeout: Annotated[float | None, typer.Option(min=0, help="Seconds a cell may take.")] = None,
    cell_memory: Annotated[float | None, typer.Option(min=0, help="MiB of resident memory a cell may take.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="To predict with: a folder; left out, fresh weights.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Plan each cell first; planned beside measured.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run all cells again.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run cells again that did not complete.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Spread the cells over a Ray cluster: auto, or HOST:PORT of its head."
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Train (or predict) along any axes and put the results side by side."""
    from drivetrain.compare import verbs
    from drivetrain.compare.cell_process import Limits
    from drivetrain.compare.matrix import Job
    from drivetrain.compare.runner import Again
    from drivetrain.compare.table import comparison_table

    again = Again.ALL if fresh else Again.FAILED if retry else Again.UNFINISHED
    file = run_file_here(run_file)
    job = Job(verb.value, None if checkpoint is None else checkpoint_here(checkpoint), plan)
    limits = Limits(cell_timeout, None if cell_memory is None else int(cell_memory * 2**20))
    try:
        comparison, where = verbs.compare(file, axes or [], to, seeds, job, limits, again, trust, ray)
    except KeyboardInterrupt:
        errors.print("[bold red]Interrupted.[/] Finished cells are kept: the same command goes on with the others.")
        raise typer.Exit(130) from None
    console = wide(output)
    console.print(comparison_table(comparison, console))
    errors.print(escape(where), soft_wrap=True)
    raise typer.Exit(0 if all(row.status in {"completed", "refused"} for row in comparison.rows) else 1)
