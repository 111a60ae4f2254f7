"""Parts that verbs of the command line share: arguments that are files or folders, and examples in their help."""

from __future__ import annotations

import functools

import typer

from drivetrain.config.files import usable_path

# of a file or folder, which it refuses to take from a text that is no path
path_argument = functools.partial(typer.Argument, parser=usable_path)
path_option = functools.partial(typer.Option, parser=usable_path)


def example(*commands: str) -> str:
    """Return the end of a verb's help: commands as a user types them."""
    return "Examples:\n\n" + "\n\n".join(f"  {command}" for command in commands)
