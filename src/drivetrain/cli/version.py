"""The verb version."""

from __future__ import annotations

import typer

from drivetrain import __version__


def version() -> None:
    """Print the version of drivetrain."""
    typer.echo(__version__)
