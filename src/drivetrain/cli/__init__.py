"""The command line: a file a verb, and what it prints."""

from drivetrain.cli.app import app, main

__all__ = ["app", "main"]
