"""A plan on the screen: the table, the choice with the line to type, the questions that led there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from drivetrain.plan.rows import Plan, Row

MOST_WAYS = 4  # of an engine, that --explain shows
MOST_NAMED = 8  # engines that were not examined


def render(plan: Plan, command: str) -> Group:
    """Returns the plan for a reader. command: `drivetrain train run.yaml` with the user's overrides."""
    from drivetrain.plan.questions import FIGURES, path_of

    parts: list[RenderableType] = [_table(plan), *map(Text, _below_table(plan)), Text()]
    if plan.choice is not None:
        parts += [Text("The line to type:", style="bold"), Text(f"  {line_of(plan.choice, command)}")]
        parts += [*map(Text, _on_nodes(plan.choice)), Text()]
    parts.append(Text.assemble(("The questions that led there", "bold"), f" ({FIGURES}):"))
    parts += [Text(f"  {line}") for line in path_of(plan).lines()]
    parts += [Text(f"note  {line}") for line in plan.notes]
    parts += [Text(f"offer {line}") for line in plan.offers]
    return Group(*parts)


def line_of(row: Row, command: str) -> str:
    """Returns the command that trains a row's way; of several nodes, the one that is typed on the first of them."""
    quoted = (f'"{each}"' if set(each) & set(" {}[]") else each for each in row.overrides)
    meeting = ["--node-rank 0 --rendezvous HOST:PORT"] if row.run.nodes > 1 else []
    return " ".join([command, *quoted, *meeting])


def _on_nodes(row: Row) -> Iterator[str]:
    """Yields how the line starts on each of several nodes."""
    if row.run.nodes > 1:
        yield (
            f"on each of the {row.run.nodes} nodes, with --node-rank 0 to {row.run.nodes - 1} and HOST:PORT of the "
            "first; drivetrain launch with the same words and --slurm, --kubernetes or --skypilot prints what starts "
            "it on a cluster."
        )


def _table(plan: Plan) -> Table:
    from drivetrain.plan.columns import columns, shown_rows

    rows, _ = shown_rows(plan)
    shown = columns(plan)
    table = Table(title=f"planned, not measured, on {plan.machine}", box=None, pad_edge=False)
    table.title_justify = "left"
    for column in shown:
        table.add_column(column.name, overflow="fold")
    for row in rows:
        if row.at_best is not None:
            continue
        style = "green" if row is plan.choice else ""
        table.add_row(*(escape(column.text(plan, row)) for column in shown), style=style)
    return table


def _below_table(plan: Plan) -> Iterator[str]:
    """Yields what is held beside the tensors of the rows, and sentences about the ways that have no row."""
    from drivetrain.plan.columns import held_beside, shown_rows

    rows, left_out = shown_rows(plan)
    if beside := held_beside(plan):
        yield beside
    slow = list(dict.fromkeys(row.run.engine.label for row in rows if row.at_best is not None))
    if slow:
        least = min(row.at_best for row in rows if row.at_best is not None)
        named = ", ".join(slow[:MOST_NAMED]) + (f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else "")
        yield f"Not examined, as a step takes {least:.3g} s at best: {named}."
    if left_out:
        yield f"--json has {left_out} more ways."


def explained(plan: Plan, engine: str) -> Iterator[str]:
    """Yields why the ways of an engine are not the choice: their best ones beside it. engine: its label, or a part of
    it."""
    from drivetrain.plan.columns import words_of

    rows = [row for row in plan.rows if engine in (row.run.engine.name, row.run.engine.label)]
    if not rows:
        known = ", ".join(dict.fromkeys(row.run.engine.label for row in plan.rows))
        yield f"{engine} is none of the ways that were planned: {known}"
        return
    choice = plan.choice
    for row in rows[:MOST_WAYS]:
        yield f"{words_of(row)}: {_why_not(row, choice)}"
    if len(rows) > MOST_WAYS:
        yield f"{len(rows) - MOST_WAYS} more ways of {engine} are behind these"


def _why_not(row: Row, choice: Row | None) -> str:
    if row is choice:
        return "is the choice"
    if row.fits != "yes" or choice is None or row.seconds is None or choice.seconds is None:
        return row.verdict
    ratio = row.seconds / choice.seconds
    if row.is_emulated:
        return "fits, but is emulated on this device: its speed means nothing"
    slower = f"{ratio:.2f} times the choice's step time" if ratio > 1.01 else "as quick as the choice, which is simpler"
    bound = "" if row.timing is None else f", bound by {row.timing.bound_by}"
    return f"fits; {row.seconds:.3g} s a step, {slower}{bound}"


def print_explanation(plan: Plan, engines: Sequence[str], console: Console) -> None:
    for engine in engines:
        for line in explained(plan, engine):
            console.print(escape(line), soft_wrap=True)
