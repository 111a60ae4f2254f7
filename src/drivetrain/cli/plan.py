"""The verb plan: what a run would take, before it is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from drivetrain.cli.arguments import RunFile, TrustOption
from drivetrain.cli.console import output, wide
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.plan.verdict import Verdict


def plan(
    run_file: RunFile,
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,VALUE", help="Axes, e.g. engine=ddp,fsdp; one value overrides."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: TrustOption = False,
) -> None:
    """Predict the memory that a run takes, a row for each combination of the axes. Nothing is trained."""
    from drivetrain.compare.axes import choices, read_axes
    from drivetrain.plan.candidates import candidates, planned
    from drivetrain.plan.verdict import verdict
    from drivetrain.runtime.hardware import detect

    machine = detect()
    ways = list(choices(*read_axes(axes or [])))
    found = candidates(run_file, [way.overrides for way in ways], machine, trust)
    verdicts = [verdict(each, machine) for each in planned(found, machine)]
    labels = [way.label for way in ways]
    if as_json:
        rows = [{"candidate": label, **each.row()} for label, each in zip(labels, verdicts, strict=True)]
        typer.echo(dumps({"machine": _machine(machine), "rows": rows}, indent=2))
        return
    console = wide(output)
    console.print(_table(labels, verdicts, machine.device_name))
    for line in _reasons(labels, verdicts):
        console.print(line, soft_wrap=True)


def _machine(machine: Any) -> dict[str, Any]:
    return {"device": machine.device, "name": machine.device_name, "memory_bytes": machine.memory_bytes}


def _table(labels: Sequence[str], verdicts: Sequence[Verdict], machine: str) -> Table:
    from drivetrain.plan.step_costs import PARTS
    from drivetrain.tracking.quantities import size_text

    title = f"planned, not measured, for {machine}: memory of the rank that takes most"
    table = Table(title=title, title_justify="left")
    for name in ("", "engine", "precision", "ranks", "fits"):
        table.add_column(name, no_wrap=True)
    for name in ("allocated", *PARTS):
        table.add_column(name, justify="right")
    for label, each in zip(labels, verdicts, strict=True):
        run, memory = each.planned.candidate.run, each.memory
        names = ("?", "?", "?") if run is None else (run.engine.label, run.precision, str(run.world_size))
        sizes = [] if memory is None else [memory.allocated, *(memory.parts.get(part, 0) for part in PARTS)]
        table.add_row(escape(label), *names, each.fits_text, *map(size_text, sizes))
    return table


def _reasons(labels: Sequence[str], verdicts: Sequence[Verdict]) -> Iterator[str]:
    for label, each in zip(labels, verdicts, strict=True):
        if each.reason is not None:
            yield f"[bold]{escape(label)}[/]: {escape(each.reason)}"
