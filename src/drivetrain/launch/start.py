"""Starts a verb's work: here, among the ranks of another launcher, or in separate processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from drivetrain.config.location import store_address
from drivetrain.data.remote_sources import fetched
from drivetrain.errors import Interrupted, UserError, problem
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.job import Job, Node, Result, lost
from drivetrain.memory.garbage import importing
from drivetrain.runtime.heartbeat import Heart
from drivetrain.runtime.lock import held

if TYPE_CHECKING:
    from drivetrain.launch.restarts import Place


def start(task: Job, node: Node | None = None, place: Place | None = None) -> Result:
    """Does the job in as many processes as its run asks for. Returns a result or raises errors, as if there were one
    process. place: where they run; None: on this machine, or on `node` among several."""
    if place is not None:
        with importing():
            from drivetrain.launch.restarts import in_place
        with _own_folder(task, True) as ready:
            return in_place(ready, place)
    node, task = node or Node(), _with_sources(task)
    outer = OuterLauncher.here()
    if outer is not None:
        _refuse_again(task)
    if outer is not None and outer.world_size > 1:
        with _own_folder(task, outer.rank == 0) as ready:
            return _joining(ready)
    with _own_folder(task, node.rank == 0) as ready:
        with importing():
            from drivetrain.launch.restarts import cut_to_fit, in_ranks
        if task.run.world_size > 1 or task.max_restarts:
            return in_ranks(ready, node)
        with importing():
            from drivetrain.launch.diagnostics.process_state import waits_on_gpu
            from drivetrain.launch.diagnostics.stack_request import Alone
            from drivetrain.launch.execute import perform
        ready = cut_to_fit(ready, node)
        with Heart(listener=Alone(task.run.hang_seconds), spins=waits_on_gpu) as heart:
            return perform(ready, heart=heart)


def _with_sources(task: Job) -> Job:
    """Returns the job with this machine's copies of what its run reads from stores. Raises UserError with all that
    cannot be fetched, and with what the files of a fetched model show."""
    if task.data is not None and store_address(task.data) is not None:
        from drivetrain.inference.remote_places import here

        task = task.model_copy(update={"data": str(here(task.data, field="--data"))})
    run = fetched(task.run)
    if run is task.run:
        return task
    problems = [*run.workload.file_problems()]
    if problems:
        raise UserError(problems)
    return task.model_copy(update={"run": run})


def start_at_terminal(task: Job, node: Node, place: Place | None = None) -> Result:
    """Does the same; Ctrl-C, which command-line libraries turn into a silent exit, becomes Interrupted, with the
    training that is lost or the predictions that are kept."""
    try:
        return start(task, node, place)
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted{lost(task)}") from None


def _refuse_again(task: Job) -> None:
    """Refuses a second start: torchrun starts the same command again when a rank has died."""
    earlier = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if task.overwrite and earlier:
        why = f"torchrun starts this run again (restart {earlier}), and what it saved before would be deleted"
        fix = "give --resume instead: where there is no checkpoint it begins anew"
        raise problem("--overwrite", why, fix if task.verb == "train" else "leave it out: the same command goes on")


@contextmanager
def _own_folder(task: Job, is_first: bool) -> Iterator[Job]:
    """Locks a training's folder for it, over all restarts."""
    if task.verb != "train" or not is_first:
        yield task
        return
    with held(task.run.folder) as notice:
        yield task if notice is None else task.model_copy(update={"notices": [*task.notices, notice]})


def _joining(task: Job) -> Result:
    import torch.distributed as dist

    from drivetrain.launch.diagnostics.process_state import waits_on_gpu
    from drivetrain.launch.diagnostics.stack_request import Alone
    from drivetrain.launch.execute import perform
    from drivetrain.launch.group import join, leave
    from drivetrain.runtime.hardware import detect

    warnings = join(detect(task.run.device).device)
    task = task.model_copy(update={"notices": [*task.notices, *warnings]})
    with Heart(None, dist.get_rank(), Alone(task.run.hang_seconds), waits_on_gpu) as heart:
        result = perform(task, heart=heart)
    of_first = dist.get_rank() == 0
    leave()
    return result.model_copy(update={"of_first": of_first})
