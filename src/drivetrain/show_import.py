"""What an import came to, on the screen: the fate of every key, what is missing, what cannot work on this machine."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from drivetrain.config import rules
from drivetrain.config.resolve import resolved
from drivetrain.hardware import detect
from drivetrain.importing.verb import Imported
from drivetrain.show import show_notes


def show_import(imported: Imported, output: Console, errors: Console) -> None:
    show_notes(imported.notes, output)
    if imported.missing:
        lacking = f"[bold yellow]missing[/] {', '.join(imported.missing)}"
        cure = "write it in, or import with --onto RUN.YAML"
        errors.print(f"{lacking}: the run file is incomplete and cannot train; {cure}", soft_wrap=True)
    if imported.run is not None:
        machine = detect(imported.run.device)
        for found in rules.check(resolved(imported.run, machine), machine):
            text = f"on this machine: {found.field}: {found.why}; {found.fix}"
            errors.print(f"[yellow]note[/] {escape(text)}")
    errors.print(f"run file in {escape(str(imported.output))}", soft_wrap=True)
