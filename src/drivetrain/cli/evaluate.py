"""The verb evaluate: the metrics of checkpoints over evaluation data, as JSON or as a table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from drivetrain.cli.arguments import TrustOption, checkpoint_here, here, path_option
from drivetrain.cli.console import errors, wide
from drivetrain.cli.console import output as screen
from drivetrain.cli.jobs import start_job
from drivetrain.errors import problem, together
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.compare.evaluations import Evaluation
    from drivetrain.launch.job import Result
    from drivetrain.launch.prepare import Checked

Row = dict[str, Any]
LABELS = ("data", "model", "step")  # the columns that say which evaluation a row is


def evaluate(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [KEY=VALUE]...",
            help="Run files, folders of runs or of checkpoints; overrides, e.g. precision=bf16-mixed.",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="best, last, or a checkpoint folder; several are all evaluated.  [best]")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Evaluation data in place of the run's own; several are all evaluated.")
    ] = None,
    choices: Annotated[
        Path | None,
        path_option(
            "--multiple-choice", help="Folder of MMLU, C-Eval or CMMLU: questions are answered by log-probability."
        ),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Answered examples before each such question.")] = 0,
    subject: Annotated[list[str] | None, typer.Option(help="Of those questions; left out, all subjects.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON where a table would be printed.")] = False,
    trust: TrustOption = False,
) -> None:
    """Evaluate checkpoints. One prints JSON; several, or several data sets, print a table: intervals of 95 % and
    differences from the first, over the same samples."""
    from drivetrain.compare.evaluating import asked, evaluations, places_and_overrides
    from drivetrain.runtime.model_places import refuse_unknown_model

    checkpoint = [checkpoint_here(each) for each in checkpoint or []]
    places, overrides = places_and_overrides(runs)
    places = [here(place, checkpoint or ["best"]) for place in places]
    if choices is not None:
        _refuse_beside_choices(overrides, data)
        together([functools.partial(refuse_unknown_model, str(place), "RUN") for place in places])
        _print(_choices(places, checkpoint or [], choices, shots, subject or [], trust), as_json)
        return
    if shots or subject:
        fix = "give --multiple-choice FOLDER, or leave them out"
        raise problem("--shots, --subject", "they are of questions of multiple choice", fix)
    wanted = asked(places, overrides, checkpoint or [], data or [], trust)
    done = []
    for each in evaluations(wanted, _start):
        done.append(each)
        if len(wanted) > 1:
            errors.print(escape(f"{len(done)}/{len(wanted)}  {each.model}: {each.failure or 'done'}"), soft_wrap=True)
    if len(wanted) > 1 and done:
        _print(done, as_json)
    elif done:  # else another process prints the result
        from drivetrain.compare.evaluations import table_of

        row = table_of(done)[0]
        typer.echo(dumps({**(done[0].result or {}), "intervals": row["intervals"]}, indent=2))


def _choices(
    places: list[Path], checkpoints: list[str], folder: Path, shots: int, subjects: list[str], trust: bool
) -> list[Evaluation]:
    from drivetrain.compare.choice_evaluations import choice_evaluations
    from drivetrain.compare.evaluating import models_of

    def tell(line: str) -> None:
        errors.print(f"[dim]{escape(line)}[/]", soft_wrap=True)

    return choice_evaluations(list(models_of(places, checkpoints)), folder, shots, subjects, trust, tell)


def _refuse_beside_choices(overrides: list[str], data: list[str] | None) -> None:
    given = [*overrides, *(f"--data {each}" for each in data or [])]
    if given:
        why = f"{given[0]} has no effect on questions of multiple choice"
        raise problem("--multiple-choice", why, "leave it out, or evaluate twice")


def _print(done: Sequence[Evaluation], as_json: bool) -> None:
    """Prints a table or JSON. Raises Exit if some evaluation failed."""
    from drivetrain.compare.evaluations import table_of

    rows = table_of(done)
    if as_json:
        typer.echo(dumps({"rows": rows}, indent=2))
    else:
        console = wide(screen)
        console.print(_table(rows, console))
        _print_notes(rows)
    if any(row["failure"] for row in rows):
        raise typer.Exit(1)


def _start(ready: Checked, checkpoint: str, scores: Path) -> Result:
    return start_job(ready, verb="evaluate", checkpoint=checkpoint, scores=scores)


# --- the table --------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], console: Console) -> Table:
    """Returns a table of the metrics: a row of each evaluation, with a column of differences after each metric that has
    some; where the console is too narrow for that, a row of each metric."""
    lines = _lines(rows)
    across = _drawn(lines)
    unbounded = console.options.update(width=10_000)
    if Measurement.get(console, unbounded, across).maximum <= console.width:
        return across
    return _drawn([list(line) for line in zip(*lines, strict=True)])


def _drawn(lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(lines[0]):
        table.add_column(escape(name), justify="left" if number == 0 or name in LABELS else "right", overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(escape, line))
    return table


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the table's cells, the names of its columns first."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    differing = {name for row in rows for name in row["differences"]}
    by_data = any(row["data"] is not None for row in rows)
    by_step = any(row["checkpoint"] or row["failure"] for row in rows)
    head = [*(["data"] if by_data else []), "model", *(["step"] if by_step else []), "samples"]
    for name in names:
        head += [name, "difference"] if name in differing else [name]
    lines = [head]
    for row in rows:
        cells = [*([row["data"]] if by_data else []), row["model"], *([_step(row)] if by_step else [])]
        cells.append("" if row["samples"] is None else f"{row['samples']:,}")
        for name in names:
            cells.append(_value(row, name))
            cells += [_difference(row["differences"].get(name))] if name in differing else []
        lines.append([str(cell) for cell in cells])
    return lines


def _step(row: Row) -> str:
    if row["failure"]:
        return "failed"
    return "" if row["checkpoint"] is None else Path(row["checkpoint"]).name.removeprefix("step-").lstrip("0") or "0"


def _value(row: Row, name: str) -> str:
    if name not in row["metrics"]:
        return ""
    ends = row["intervals"].get(name)
    return f"{row['metrics'][name]:.4f}" + ("" if ends is None else f" [{ends[0]:.4f}, {ends[1]:.4f}]")


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['value']:+.4f} [{low:+.4f}, {high:+.4f}]" + ("" if found["paired"] else " unpaired")


def _print_notes(rows: Sequence[Row]) -> None:
    if any(row["differences"] for row in rows):
        text = "in brackets: intervals of 95 %; differences are from the first model, sample by sample unless unpaired"
        errors.print(f"[dim]{text}[/]", soft_wrap=True)
