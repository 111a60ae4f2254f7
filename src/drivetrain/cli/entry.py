"""Runs the command line, and prints the errors with which a command ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from rich.markup import escape

from drivetrain.cli.app import app_of
from drivetrain.cli.console import errors
from drivetrain.errors import Interrupted, RankError, RunError, UserError
from drivetrain.memory.garbage import importing, own_process


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. A user's error or a failed run prints its message; a traceback means a bug of ours."""
    if arguments is None:
        own_process()
    given = sys.argv[1:] if arguments is None else arguments
    # the deepspeed launcher adds --local_rank=N, which LOCAL_RANK says as well
    own = [word for word in given if not word.startswith(("--local_rank=", "--local-rank="))]
    with importing():
        app = app_of(own)
    try:
        code: Any = _reported(functools.partial(app, args=own))
    except SystemExit as end:  # typer ends every command with one
        code = end.code
    if "torch.distributed" in sys.modules:
        from drivetrain.launch.external_launcher import end_if_rank

        end_if_rank(int(code or 0))
    sys.exit(code)


def _reported(command: Callable[[], Any]) -> int:
    try:
        command()
    except UserError as error:
        _print_problems(error)
        return 2
    except RunError as error:
        errors.print(f"[bold red]The run failed.[/] {escape(str(error))}")
        return 1
    except RankError as error:
        errors.print(f"{escape(error.traceback)}[bold red]The run failed.[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except Interrupted as error:
        errors.print(f"[bold red]{escape(str(error))}.[/]", soft_wrap=True)
        return 130
    return 0


def _print_problems(error: UserError) -> None:
    count = len(error.problems)
    errors.print(f"[bold red]{count} problem{'s' if count > 1 else ''}:[/] refused before any work.")
    for number, found in enumerate(error.problems, start=1):
        errors.print(f"  [bold]{escape(found.field)}[/]: {escape(found.why)}")
        if number == count or error.problems[number].fix != found.fix:
            errors.print(f"      [green]{escape(found.fix)}[/]", soft_wrap=True)  # it may be a command to copy
