"""The verb check: the dry run of a run file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from drivetrain.cli.arguments import NodesOption, Overrides, RunFile, TrustOption, run_file_here
from drivetrain.cli.console import output, print_notices
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.launch.dry_run import DryRun


def check(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="As it would go on with --resume.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="As it would start with --overwrite.")] = False,
    nodes: NodesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_lines: Annotated[
        bool, typer.Option("--json-lines", help="Print JSON in a line: before each part what is known, at last all.")
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Dry run: everything that `train` would refuse, at once. Reads the data, builds the model, writes nothing."""
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run, --overwrite replaces it: give one of them")
    from drivetrain.errors import UserError
    from drivetrain.launch.dry_run import dry_run

    given = (run_file_here(run_file), overrides or [], nodes, resume, overwrite, trust)
    found = dry_run(*given, print_line) if as_lines else dry_run(*given)
    if as_lines:
        print_line(found)
    elif as_json:
        typer.echo(dumps(as_object(found), indent=2))
    if as_lines or as_json:
        raise typer.Exit(0 if found.is_ready else 2)
    print_notices(found.notices)
    if not found.is_ready:
        raise UserError(found.problems)
    output.print(table(found))


def print_line(found: DryRun, following: str | None = None) -> None:
    """Prints what is known, and the part that is looked at next (data, model or plan; null at last), as a line of
    JSON."""
    typer.echo(dumps({"next": following, **as_object(found)}))


def as_object(found: DryRun) -> dict[str, Any]:
    """Returns the result as `--json` prints it."""
    return {
        "ready": found.is_ready,
        "problems": [each.as_dict() for each in found.problems],
        "notices": found.notices,
        **found.facts,
    }


def table(found: DryRun) -> Table:
    """Returns the facts of a run that can start, a row each."""
    shown = Table(title="nothing would be refused", title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, text in _rows(found.facts).items():
        shown.add_row(name, escape(text))
    return shown


def _rows(facts: dict[str, Any]) -> dict[str, str]:
    from drivetrain.errors import counted
    from drivetrain.tracking.quantities import size_text

    run, data, model, saved = (facts[name] for name in ("run", "data", "model", "checkpoints"))
    samples, unit = {part: data[f"{part}_samples"] for part in ("training", "evaluation")}, data["unit"]
    epoch = "" if facts["steps_per_epoch"] is None else f", {facts['steps_per_epoch']:,} an epoch"
    free = f"{saved['free_bytes'] / 2**30:,.1f} GiB free"
    plan = facts.get("plan")
    return {
        "run": f"engine={run['engine']}, precision={run['precision']}, {counted(run['ranks'], 'rank')}",
        "device": run["device"],
        "data": ", ".join(
            f"{part}: {'a stream' if size is None else counted(size, unit)}" for part, size in samples.items()
        ),
        "length": f"{counted(facts['steps'], 'step')} of {counted(run['batch_size'], unit)}{epoch}",
        "model": f"{counted(model['parameters'], 'parameter')}, {model['trained_parameters']:,} trained",
        **({} if plan is None else {"plan": _planned(plan)}),
        "folder": f"{facts['folder']} is free",
        "disk": f"{counted(saved['kept'], 'checkpoint')} of at least {size_text(saved['bytes'])} each; {free}",
    }


def _planned(plan: dict[str, Any]) -> str:
    from drivetrain.tracking.quantities import size_text

    time = "" if plan["step_seconds"] is None else f"; {plan['step_seconds']:.3g} s a step"
    memory = f"{size_text(plan['allocated_bytes'])} of {size_text(plan['capacity_bytes'])} a rank"
    return f"planned: {plan['verdict']}; {memory}{time}"
