"""A comparison for the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drivetrain.compare.advice import advice
from drivetrain.compare.columns import Column, Figures
from drivetrain.compare.rows import Comparison, Row


def comparison_table(comparison: Comparison) -> Group:
    """Rows in the order of the matrix; a row without a result has its reason below the table."""
    figures, all_completed = Figures(comparison), all(row.status == "completed" for row in comparison.rows)
    table = Table(title=f"{comparison.name}: {comparison.verb}", title_justify="left")
    for name in comparison.head:
        table.add_column(escape(name), no_wrap=True)
    for column in figures.columns:
        table.add_column(column.name, justify="right")
    if not all_completed:
        table.add_column("status")
    for row in comparison.rows:
        status = [] if all_completed else ["" if row.status == "completed" else f"[red]{row.status}[/]"]
        shown = (_figure(row, column, figures) for column in figures.columns)
        table.add_row(*map(escape, row.names), *shown, *status)
    reasons = [
        f"[bold]{escape(row.label)}[/]: {row.status}: {escape(row.reason)}" for row in comparison.rows if row.reason
    ]
    return Group(table, *map(Text.from_markup, reasons), Text(advice(comparison), style="bold"))


def _figure(row: Row, column: Column, figures: Figures) -> str:
    text = column.text(row)
    return f"[bold green]{text}[/]" if figures.is_best(row, column) else text
