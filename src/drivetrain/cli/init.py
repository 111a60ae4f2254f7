"""The verb init: a run file to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import path_option
from drivetrain.cli.console import output
from drivetrain.errors import problem


def init(
    name: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Of drivetrain recipes.")] = None,
    data: Annotated[
        Path | None, path_option("--data", help="Data to train on: a table, a text, or a folder of pictures.")
    ] = None,
    to: Annotated[Path | None, path_option("--output", "-o", help="Run file to write; left out, run.yaml.")] = None,
    text_column: Annotated[str | None, typer.Option("--text-column", help="Column of the texts.")] = None,
    label_column: Annotated[str | None, typer.Option("--label-column", help="Column of the labels.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write a run file to begin with: a recipe, made to fit your data if you name them."""
    from drivetrain.init.write import written

    to = to or Path("run.yaml")
    if data is None and (text_column or label_column):
        raise problem("--data", "a column was named, but no data were given", "add --data FILE")
    made = written(name, data, to, text_column, label_column, overwrite)
    for line in made.decisions:
        output.print(f"  {escape(line)}", soft_wrap=True)
    output.print(f"[bold]{escape(', '.join(map(str, made.files)))}[/] written. Next:", soft_wrap=True)
    for purpose, verb in (("look at the data", "data"), ("train", "train")):
        if verb == "train" or made.has_data:
            output.print(f"  drivetrain {verb} {escape(shlex.quote(str(to)))}  [dim]# {purpose}[/]", soft_wrap=True)
