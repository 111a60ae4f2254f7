"""The verb recipes: the run files that come with drivetrain."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Column, Table

from drivetrain.cli.console import output


def recipes() -> None:
    """List the recipes that come with drivetrain."""
    from drivetrain.init.catalogue import recipes as listed

    table = Table(Column("recipe", no_wrap=True), "what it trains", box=None, pad_edge=False)
    for name, sentence in listed():
        table.add_row(escape(name), escape(sentence))
    output.print(table)
    output.print("\n[dim]drivetrain init RECIPE writes one; with --data it is made to fit your data[/]", soft_wrap=True)
