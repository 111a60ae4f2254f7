"""`drivetrain doctor`: shows what works on this machine, and packs it for a report of a bug."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from drivetrain.cli.arguments import path_argument, path_option
from drivetrain.cli.console import output
from drivetrain.runtime.strict_json import dumps


def doctor(
    run: Annotated[
        Path | None, path_argument(metavar="FOLDER", help="With --bundle: a run's folder, whose records go along.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Pack what a maintainer needs to see into a .tar.gz file.")
    ] = False,
    to: Annotated[
        Path | None, path_option("--output", "-o", help="With --bundle: the file; left out, one with the time.")
    ] = None,
) -> None:
    """Show hardware, versions, what works here and why not; --bundle packs it for a report of a bug."""
    if not bundle and (run is not None or to is not None):
        raise typer.BadParameter("a folder and --output are for --bundle")
    from drivetrain.doctor.findings import examine

    findings = examine()
    if bundle:
        _pack(findings, run, to or Path(time.strftime("drivetrain-bundle-%Y%m%d-%H%M%S.tar.gz")))
    elif as_json:
        typer.echo(dumps(findings, indent=2))
    else:
        output.print(render(findings))


def _pack(findings: dict[str, Any], run: Path | None, to: Path) -> None:
    from drivetrain.doctor.bundle import pack

    for name, size in pack(findings, run, to).items():
        output.print(f"  {escape(name)}  [dim]{size:,} bytes[/]", soft_wrap=True)
    output.print(
        f"These files are in {escape(str(to))}. Variables and settings whose names look like secrets were left out, "
        "but paths, host names and what a run printed are as they were: look through it before you send it.",
        soft_wrap=True,
    )


def render(findings: dict[str, Any]) -> Group:
    """Returns the findings as tables."""
    return Group(_machine(findings), _works(findings), _devices(findings))


def _machine(findings: dict[str, Any]) -> Table:
    table = Table(title="machine", show_header=False, title_justify="left")
    memory = f"{findings['memory_bytes'] / 2**30:.1f} GiB"
    table.add_row(
        "device", f"{findings['device_name']} ({findings['device']}), {memory}, {findings['cpu_cores']} cores"
    )
    table.add_row("native dtypes", ", ".join(findings["native_dtypes"]))
    table.add_row("free disk here", f"{findings['free_disk_bytes'] / 2**30:.1f} GiB")
    table.add_row("platform", findings["platform"])
    software = {name: number for name, number in findings["software"].items() if name not in ("device", "GPU")}
    for name, number in {**findings["versions"], **software}.items():
        table.add_row(name, number)
    return table


def _works(findings: dict[str, Any]) -> Table:
    table = Table("what", "works", "why", title="what works here", title_justify="left")
    rows = {
        **{f"precision={name}": answer for name, answer in findings["precisions"].items()},
        **{f"engine={name}": answer for name, answer in findings["engines"].items()},
        **findings["tries"],
        **findings["optional"],
        **findings["native_builds"],
        "compile=true": findings["compile"],
    }
    for name, (state, why) in rows.items():
        table.add_row(escape(name), _coloured(state), escape(why))
    return table


def _devices(findings: dict[str, Any]) -> Table:
    table = Table("device", "here", "what a run can do on it", "tried", title="kinds of devices", title_justify="left")
    for kind in findings["devices"].values():
        here = "[green]yes[/]" if kind["here"] else "no"
        table.add_row(kind["name"], here, escape(kind["abilities"]), escape(kind["tried"]))
    return table


def _coloured(state: str) -> str:
    return {"yes": "[green]yes[/]", "no": "[red]no[/]"}.get(state, f"[yellow]{state}[/]")
