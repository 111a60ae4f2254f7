"""The verb plan: what a run would take, on this machine or on one that is not here, and which way to run it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import RunFile, TrustOption, as_typed, path_option, run_file_here
from drivetrain.cli.console import errors, output, wide
from drivetrain.runtime.strict_json import dumps

MOST = 10**15  # samples; far more than there are, and few enough for any count of them


def plan(
    run_file: RunFile,
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,VALUE", help="Ways to plan as they stand; one value overrides."),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="As 8xH100-80GB, or nodes x devices x kind: 8x8xH100-80GB.")
    ] = "this machine",
    devices: Annotated[Path | None, path_option("--devices", help="YAML with devices of your own.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of one device for an hour.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="With --length: so many made samples, where the data are not there."),
    ] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens of each of --samples.")] = None,
    explain: Annotated[list[str] | None, typer.Option(help="An engine: why it is not the choice.")] = None,
    to: Annotated[Path | None, path_option("--output", "-o", help="Folder for a page, a chart and all rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: TrustOption = False,
) -> None:
    """Predict memory, time and cost, and find the quickest way that fits. Nothing is trained."""
    from drivetrain.cli.plan_table import explained, line_of, print_explanation, render
    from drivetrain.plan.page import prepare, write_page
    from drivetrain.plan.planning import planned
    from drivetrain.plan.stand_ins import with_made_data
    from drivetrain.runtime.status_line import StatusLine

    file = run_file_here(run_file)
    if to is not None:
        prepare(to)
    with with_made_data(file, samples, length, axes or []) as file, StatusLine("planning") as line:
        found = planned(file, axes or [], machine, devices, price, trust, line.say)
    command = shlex.join(["drivetrain", "train", as_typed(run_file)])
    if as_json:
        reasons = {"explained": {each: [*explained(found, each)] for each in explain}} if explain else {}
        typer.echo(dumps(found.as_object() | reasons, indent=2))
    elif explain:
        print_explanation(found, explain, output)
    else:
        wide(output).print(render(found, command))
    if to is not None:
        write_page(found, to, run_file.stem, "" if found.choice is None else line_of(found.choice, command))
        errors.print(f"page, chart and rows in {escape(str(to))}", soft_wrap=True)
    raise typer.Exit(0 if any(row.costs is not None for row in found.rows) else 1)
