"""The command line: one short function a verb. torch is imported inside the verbs, so that --help is instant."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from drivetrain import __version__
from drivetrain.errors import RunError, UserError

if TYPE_CHECKING:
    from drivetrain.config.machine import Machine
    from drivetrain.config.run import RunConfig

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed while running, 2 refused before any work, 130 / 143 saved after Ctrl-C / SIGTERM."
)

app = typer.Typer(
    help=f"Train a PyTorch model under any precision and engine from one run file.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
errors = Console(stderr=True, highlight=False)
output = Console(highlight=False)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.YAML", help="Run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, e.g. precision=bf16-mixed lr=3e-4.")
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="best, last, or a checkpoint folder.")]


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the result.")] = False,
) -> None:
    """Train. `drivetrain fields` lists every key of a run file."""
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run, --overwrite replaces it: give one of them")
    config, machine, notices = _read(run_file, overrides)
    from drivetrain.run import run
    from drivetrain.show import report_table

    report, code = run(config, machine, notices, resume, overwrite, quiet)
    output.print(report_table(report))
    raise typer.Exit(code)


@app.command()
def evaluate(run_file: RunFile, overrides: Overrides = None, checkpoint: CheckpointOption = "best") -> None:
    """Evaluate a checkpoint of a run; prints JSON."""
    config, machine, notices = _read(run_file, overrides)
    from drivetrain.inference import verbs

    _say(notices)
    result = verbs.evaluate(config, machine, checkpoint)
    typer.echo(json.dumps(result, indent=2))


@app.command()
def predict(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    data: Annotated[str | None, typer.Option(help="What to predict for; left out, the evaluation data.")] = None,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="File .jsonl or .csv; left out, the screen.")
    ] = None,
) -> None:
    """Predict with a checkpoint of a run: one row a sample, in order."""
    config, machine, notices = _read(run_file, overrides)
    from drivetrain.inference import verbs

    _say(notices)
    rows = verbs.predict(config, machine, checkpoint, data)
    if to is None:
        for row in rows:
            typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        count = verbs.write_predictions(rows, to)
        errors.print(f"{count} predictions in {escape(str(to))}")


@app.command()
def fields() -> None:
    """Every key of a run file, its default and what it means."""
    from drivetrain.config.load import field_paths

    table = Table(Column("key", no_wrap=True), "default", "what it means", box=None, pad_edge=False)
    seen = set()
    for path, info in field_paths():
        name = ".".join(path)
        if (name, info.description) not in seen:
            seen.add((name, info.description))
            table.add_row(escape(name), escape(_default(info)), escape(info.description or ""))
    output.print(table)


@app.command()
def schema() -> None:
    """JSON Schema of the run file, for editors."""
    from drivetrain.config.run import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Hardware, versions, what works here and why not."""
    from drivetrain.doctor import examine, render

    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        output.print(render(findings))


@app.command()
def version() -> None:
    """Version of drivetrain."""
    typer.echo(__version__)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Users' errors and failed runs are told in words; a traceback means a bug of ours."""
    sys.exit(_told(functools.partial(app, args=arguments)))


def _told(command: Callable[[], Any]) -> int:
    try:
        command()
    except UserError as error:
        _print_problems(error)
        return 2
    except RunError as error:
        errors.print(f"[bold red]The run failed.[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        errors.print("[bold red]Interrupted[/] before anything was saved.")
        return 130
    return 0


def _print_problems(error: UserError) -> None:
    count = len(error.problems)
    errors.print(f"[bold red]{count} problem{'s' if count > 1 else ''}:[/] nothing was started.")
    for found in error.problems:
        errors.print(f"  [bold]{escape(found.field)}[/]: {escape(found.why)}")
        errors.print(f"      [green]{escape(found.fix)}[/]")


def _read(run_file: Path, overrides: list[str] | None) -> tuple[RunConfig, Machine, list[str]]:
    """The checked config, the machine, and notices. UserError with every problem of schema and rules."""
    from drivetrain.config import rules
    from drivetrain.config.load import load

    config, problems = load(run_file, overrides or [])
    if config is None:
        raise UserError(problems)
    from drivetrain.hardware import detect  # only now: a broken run file is answered without importing torch

    machine = detect(config.device)
    told = {found.field for found in problems}  # a field that was taken out is not reported missing too
    problems += [found for found in rules.check(config, machine) if found.field not in told]
    if problems:
        raise UserError(problems)
    return config, machine, rules.notices(config, machine)


def _say(notices: list[str]) -> None:
    for notice in notices:
        errors.print(f"[yellow]note[/] {escape(notice)}")


def _default(info: Any) -> str:
    from pydantic import BaseModel

    if info.is_required():
        return "required"
    value = info.default
    return "" if value is None or isinstance(value, BaseModel) else str(value)
