"""The verb evaluate: the metrics of a checkpoint, as JSON."""

from __future__ import annotations

import typer

from drivetrain.cli.arguments import CheckpointOption, Overrides, RunPlace, TrustOption
from drivetrain.cli.jobs import start_job
from drivetrain.runtime.strict_json import dumps


def evaluate(
    run_file: RunPlace,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    trust: TrustOption = False,
) -> None:
    """Evaluate a checkpoint of a run; prints JSON."""
    from drivetrain.launch.prepare import checked_place

    ready = checked_place(run_file, overrides or [], checkpoint=checkpoint, trust=trust)
    result = start_job(ready, verb="evaluate", checkpoint=checkpoint)
    if result.of_first:
        typer.echo(dumps(result.value, indent=2))
