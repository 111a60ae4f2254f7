"""The verb train: trains a run on its engine, on one machine or on several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import (
    NodeRankOption,
    NodesOption,
    Overrides,
    RayOption,
    RendezvousOption,
    RunFile,
    TrustOption,
    as_typed,
    run_file_here,
)
from drivetrain.cli.console import errors, output
from drivetrain.cli.jobs import start_job

if TYPE_CHECKING:
    from drivetrain.launch.job import Node
    from drivetrain.launch.prepare import Checked
    from drivetrain.launch.restarts import Place


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the result.")] = False,
    nodes: NodesOption = None,
    node_rank: NodeRankOption = 0,
    rendezvous: RendezvousOption = None,
    ray: RayOption = None,
    trust: TrustOption = False,
) -> None:
    """Train. `drivetrain fields` lists every key of a run file."""
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run, --overwrite replaces it: give one of them")
    if ray is not None and (rendezvous is not None or node_rank):
        raise typer.BadParameter("--ray starts all machines' ranks from here: leave out --node-rank and --rendezvous")
    from drivetrain.launch.job import Node
    from drivetrain.launch.prepare import checked

    typed, run_file = run_file, run_file_here(run_file)
    if ray is None:
        node = Node(node_rank, rendezvous)
        ready = checked(run_file, overrides or [], nodes, node, trust=trust, anew=not resume)
        _train(typed, overrides or [], ready, node, None, resume, overwrite, quiet)
        return
    from drivetrain.config.packages import require

    require("--ray", ["ray"])
    from drivetrain.launch.on_ray import RayCluster
    from drivetrain.launch.ray_connection import connected

    with connected(ray):
        cluster = RayCluster()
        ready = cluster.checked(run_file, overrides or [], nodes, trust=trust, anew=not resume)
        _train(typed, overrides or [], ready, Node(), cluster, resume, overwrite, quiet)


def _train(
    run_file: Path,
    overrides: list[str],
    ready: Checked,
    node: Node,
    place: Place | None,
    resume: bool,
    overwrite: bool,
    quiet: bool,
) -> None:
    if (
        ready.is_first and (ready.run.nodes == 1 or place is not None) and not (resume or overwrite)
    ):  # refused before any rank is started
        from drivetrain.runtime.run_folder import RunFolder

        RunFolder(ready.run.folder).refuse_if_busy()
    if ready.is_first and errors.is_terminal and not quiet:  # importing PyTorch takes seconds, in which nothing is seen
        errors.print(f"[dim]starting {escape(ready.run.name)}: loading PyTorch, then the data[/]", soft_wrap=True)
    result = start_job(ready, node, place, verb="train", resume=resume, overwrite=overwrite, quiet=quiet)
    if result.of_first:
        from drivetrain.cli.next_commands import next_commands
        from drivetrain.cli.run_table import report_table
        from drivetrain.training.report import RunReport

        found = RunReport.model_validate(result.value)
        output.print(report_table(found))
        following = next_commands(as_typed(run_file), overrides, ready.run, found.status, bool(found.metrics))
        for purpose, command in [] if quiet else following:
            output.print(f"[dim]{purpose}:[/] {escape(command)}", soft_wrap=True)
    raise typer.Exit(result.code)
