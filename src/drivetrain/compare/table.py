"""Prints a comparison on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from drivetrain.compare.advice import advice
from drivetrain.compare.columns import Column
from drivetrain.compare.figures import Figures
from drivetrain.compare.result_rows import Comparison, Row


def comparison_table(comparison: Comparison, console: Console) -> Group:
    """Returns rows in the order of the matrix; a row without a result has its reason below the table.

    Columns that the console has no room for are left out, the least important first, and named below.
    """
    figures = Figures(comparison)
    columns = list(figures.columns)
    by_weight = figures.by_weight
    table = _table(comparison, figures, columns)
    unbounded = console.options.update(width=10_000)
    while columns and Measurement.get(console, unbounded, table).maximum > console.width:
        columns.remove(by_weight.pop())
        table = _table(comparison, figures, columns)
    left_out = [column.name for column in figures.columns if column not in columns]
    notes = [
        f"[bold]{escape(row.label)}[/]: {row.status}: {escape(row.reason)}" for row in comparison.rows if row.reason
    ]
    if left_out:
        notes.append(f"[dim]too narrow for: {', '.join(left_out)}[/]")
    return Group(table, *map(Text.from_markup, notes), Text(advice(comparison), style="bold"))


def _table(comparison: Comparison, figures: Figures, columns: Sequence[Column]) -> Table:
    all_completed = all(row.status == "completed" for row in comparison.rows)
    table = Table(title=f"{comparison.name}: {comparison.verb}", title_justify="left")
    for name in comparison.head:
        table.add_column(escape(name), no_wrap=True)
    for column in columns:
        table.add_column(column.name, justify="right")
    if not all_completed:
        table.add_column("status")
    for row in comparison.rows:
        status = [] if all_completed else ["" if row.status == "completed" else f"[red]{row.status}[/]"]
        shown = (_figure(row, column, figures) for column in columns)
        table.add_row(*map(escape, row.names), *shown, *status)
    return table


def _figure(row: Row, column: Column, figures: Figures) -> str:
    text = column.text(row)
    return f"[bold green]{text}[/]" if figures.is_best(row, column) else text
