"""Arguments and options of the command line that are files or folders."""

from __future__ import annotations

import functools

import typer

from drivetrain.config.files import usable_path

# of a file or folder, which it refuses to take from a text that is no path
path_argument = functools.partial(typer.Argument, parser=usable_path)
path_option = functools.partial(typer.Option, parser=usable_path)
