"""The verb calibrate: measures this machine, and keeps its speeds for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from drivetrain.plan.calibration import Calibration, Curve

errors = Console(stderr=True, highlight=False)


def calibrate(
    as_json: Annotated[bool, typer.Option("--json", help="Print the measured points as JSON.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what was measured before; measure nothing.")] = False,
) -> None:
    """Measure this machine in one to two minutes, for the times of plans. Leave it alone meanwhile."""
    from drivetrain.errors import problem
    from drivetrain.plan.calibrate import calibrated
    from drivetrain.plan.calibration import keep, kept, kept_at
    from drivetrain.runtime.hardware import detect

    machine = detect()
    if show:
        found = kept(machine)
        if found is None:
            raise problem("--show", "this machine was not calibrated yet", "run drivetrain calibrate")
    else:
        found = calibrated(machine, lambda line: errors.print(f"[dim]measuring {escape(line)}[/]", soft_wrap=True))
        keep(found, kept_at(machine))
    _note_others(found)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    _print(found)
    verb = "measured" if show else f"measured in {found.took_seconds:.0f} s and kept"
    errors.print(f"{verb} in {escape(str(kept_at(machine)))}, for drivetrain plan", soft_wrap=True)


def _note_others(found: Calibration) -> None:
    from drivetrain.plan.calibrate_repeats import DISTURBED

    cores = found.foreign_cores
    if cores is not None and cores > DISTURBED:
        line = (
            f"other programs used {cores:.1f} cores while this was measured: the machine may seem slower than it is, "
            "and plans with it; calibrate again when they rest"
        )
        errors.print(f"[yellow]note[/] {line}", soft_wrap=True)


def _print(found: Calibration) -> None:
    console = Console(highlight=False)
    right = {"justify": "right"}
    table = Table("operation", "type", Column("one process", **right), box=None, pad_edge=False)  # type: ignore[arg-type]
    if found.together is not None:
        table.add_column("each of two at once", justify="right")
    speeds = [each for each in (found.alone, found.together) if each is not None]
    for name in ("matmul", "attention", "convolution"):
        for dtype in getattr(found.alone, name):
            table.add_row(name, dtype, *(f"{_best(getattr(each, name)[dtype]) / 1e9:,.0f} GFLOP/s" for each in speeds))
    for name in ("memory", "optimizer", "random"):
        table.add_row(name, "float32", *(f"{_rate(getattr(each, name)) / 1e9:,.1f} GB/s" for each in speeds))
    table.add_row("start of an operation", "", *(f"{each.call_seconds * 1e6:,.1f} us" for each in speeds))
    for name, curve in found.collectives.items():
        figure = f"{curve[0][1] * 1e6:,.0f} us, {_rate(curve) / 1e9:,.2f} GB/s"
        table.add_row(name, "two processes", "", figure)
    table.add_row("picture of 500 x 375", "one core", f"{found.picture_seconds * 1e3:,.1f} ms")
    table.add_row("writing to disk", "", f"{found.disk_write_bytes / 1e6:,.0f} MB/s")
    cores = f", {found.cores} cores" if found.device == "cpu" else f" x {found.device_count}"
    console.print(f"{escape(found.device_name)}{cores}, torch {found.torch}, {found.made_at}", soft_wrap=True)
    console.print(table)


def _best(curve: Curve) -> float:
    return max(size / seconds for size, seconds in curve)


def _rate(curve: Curve) -> float:
    """Returns the rate of the largest call, which no cache holds."""
    size, seconds = curve[-1]
    return size / seconds
