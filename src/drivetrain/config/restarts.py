"""A run on fewer devices than it asks for: only the data axis is smaller, and the global batch stays."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, problem


def shrunk(run: RunConfig, world: int) -> RunConfig:
    """Returns the run with `world` ranks in all; unchanged if it has as many already. The result is the same on every
    node, however many ranks each of them has left: all must agree on the run.

    Raises UserError with the smallest world size that works.
    """
    if world == run.world_size:
        return run
    least = run.engine.smallest_world
    if world % least:
        why = f"{world} of {run.world_size} ranks are left, but {run.engine.label} needs a multiple of {least}"
        fix = f"the smallest world that works is {least}: go on with --resume once there are as many devices"
        raise problem("engine", why, fix)
    processes = run.processes or 1
    nodes = world // processes if world % processes == 0 else 1  # nodes that lack a device count as one
    changed = {
        "processes": world // nodes,
        "nodes": nodes,
        "min_nodes": None,
        "batch_size": run.global_batch,
        "batch_size_per_device": None,
        "engine": run.engine.on(world),
    }
    return run.model_copy(update=changed)


def restart_problems(run: RunConfig) -> Iterator[Problem]:
    """Reports a minimum of nodes with which the run could never go on."""
    if run.min_nodes is None:
        return
    if run.min_nodes > run.nodes:
        yield Problem("min_nodes", f"{run.min_nodes} were given, but nodes is {run.nodes}", "give at most as many")
        return
    processes = run.processes or 1
    try:
        shrunk(run, run.min_nodes * processes)
    except UserError as error:
        yield Problem("min_nodes", error.problems[0].why, f"give min_nodes * processes >= {run.engine.smallest_world}")
