"""The command line: one file for each verb, with the tables that it prints."""

from drivetrain.cli.app import app, main

__all__ = ["app", "main"]
