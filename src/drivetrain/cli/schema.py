"""The verb schema: the JSON Schema of the run file."""

from __future__ import annotations

import typer

from drivetrain.runtime.strict_json import dumps


def schema() -> None:
    """Print the JSON Schema of the run file, for editors."""
    from drivetrain.config.run import RunConfig

    typer.echo(dumps(RunConfig.model_json_schema(), indent=2))
