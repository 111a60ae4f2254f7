"""The verb launch: a batch script that starts a run on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from drivetrain.cli.arguments import NodesOption, Overrides, RunFile
from drivetrain.cli.console import print_notices


def launch(
    run_file: RunFile,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for Slurm.")] = False,
    nodes: NodesOption = None,
    time: Annotated[str, typer.Option(help="Time limit of the job, HH:MM:SS.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="The cluster's machines, as 8xH100-80GB, for the plan.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores a node.")] = None,
) -> None:
    """Write a run's batch script for Slurm. `processes` counts ONE machine's GPUs: processes=8 --nodes 2 takes 16."""
    from drivetrain.launch.cluster import checked_for_cluster
    from drivetrain.launch.cluster_plan import plan_notices
    from drivetrain.launch.slurm import Allocation, sbatch_script

    if not slurm:
        raise typer.BadParameter("choose a cluster: --slurm")
    job = checked_for_cluster(run_file, overrides or [], nodes)
    print_notices([*job.notices, *plan_notices(job.run, machine)])
    typer.echo(sbatch_script(run_file, job.overrides, job.run, Allocation(time, partition, account, cpus)), nl=False)
