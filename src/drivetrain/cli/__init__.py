"""The command line: one file for each verb, with the tables that it prints."""

from drivetrain.cli.entry import main

__all__ = ["main"]
