"""`drivetrain cache`: lists tokenised data on the disk, and makes room."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from drivetrain.cli.arguments import path_option
from drivetrain.cli.console import output
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.data.cache_entries import Entry


def cache(
    folder: Annotated[
        Path | None, path_option(help="The cache, where workload.data.cache names one; left out, the user's.")
    ] = None,
    unused_days: Annotated[
        float | None, typer.Option("--unused-days", min=0, help="Remove what no run used for so many days.")
    ] = None,
    most_gb: Annotated[
        float | None, typer.Option("--most-gb", min=0, help="Remove the longest unused until so many GB are left.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the disk space of tokenised data; remove data that are not used any more. A run in progress keeps its
    data."""
    from drivetrain.data.array_store import default_root
    from drivetrain.data.cache_entries import DAY, entries, pruned

    root = folder or default_root()
    removed: list[Entry] = []
    in_use: list[Entry] = []
    if unused_days is not None or most_gb is not None:
        seconds = None if unused_days is None else unused_days * DAY
        removed, in_use = pruned(root, seconds, None if most_gb is None else int(most_gb * 1e9))
    left = entries(root)
    if as_json:
        parts = {"entries": left, "removed": removed, "in_use": in_use}
        found = {name: [{**asdict(each), "path": str(each.path)} for each in part] for name, part in parts.items()}
        typer.echo(dumps({"folder": str(root), **found}, indent=2))
        return
    for entry in removed:
        output.print(f"removed {entry.kind}, {_size(entry.bytes)}: {escape(entry.path.name)}", soft_wrap=True)
    for entry in in_use:
        output.print(f"in use, and left: {entry.kind}, {_size(entry.bytes)}: {escape(entry.path.name)}", soft_wrap=True)
    _show(left, root)


def _show(found: list[Entry], root: Path) -> None:
    if not found:
        output.print(f"{escape(str(root))} holds no tokenised data", soft_wrap=True)
        return
    table = Table("data", Column("size", justify="right"), "last used", "name", box=None, pad_edge=False)
    for entry in found:
        kind = entry.kind if entry.is_whole else f"{entry.kind}, unfinished"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(kind, _size(entry.bytes), used, f"{entry.path.name[:18]}…")
    output.print(table)
    output.print(f"{_size(sum(entry.bytes for entry in found))} in {escape(str(root))}", soft_wrap=True)


def _size(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} B"
