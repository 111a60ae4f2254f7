"""One process: the task is done here. Several: torch elastic starts the ranks, and their failures are told once."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import RankError
from drivetrain.launch.outcome import cause_of, outcomes, raised
from drivetrain.launch.outer import OuterLauncher
from drivetrain.launch.rank import TASK
from drivetrain.launch.task import Result, Task
from drivetrain.launch.variables import variables

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAVING_SECONDS = 600  # that ranks may take to save after Ctrl-C or SIGTERM


@dataclasses.dataclass(frozen=True)
class Node:
    """This machine among those of the run. rendezvous: host:port of the first one."""

    rank: int = 0
    rendezvous: str | None = None


def start(task: Task, node: Node = Node()) -> Result:
    """Do the task in as many processes as its run asks for. A result or errors, as if there were one."""
    outer = OuterLauncher.here()
    if outer is not None and outer.world_size > 1:
        return _joining(task)
    if task.run.world_size == 1:
        from drivetrain.launch.perform import perform

        return perform(task)
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-"))
    try:
        (folder / TASK).write_text(task.model_dump_json(), encoding="utf-8")
        return _in_ranks(task, node, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _joining(task: Task) -> Result:
    import torch.distributed as dist

    from drivetrain.hardware import detect
    from drivetrain.launch.group import join
    from drivetrain.launch.perform import perform

    join(detect(task.run.device).device)
    result = perform(task)
    of_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return result.model_copy(update={"of_first": of_first})


def _in_ranks(task: Task, node: Node, folder: Path) -> Result:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    failure: ChildFailedError | None = None
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what happens is told once, by us
    with variables(_for_ranks(task)):
        try:
            command = ("-m", "drivetrain.launch.rank", str(folder), str(os.getpid()))
            elastic_launch(_launch_config(task, node, folder), sys.executable)(*command)
        except ChildFailedError as error:
            failure = error
        except SignalException as stopped:
            if not any(outcome.kind == "done" for outcome in outcomes(folder)):  # before they could save
                if stopped.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise RankError(f"ended by {signal.Signals(stopped.sigval).name} before anything was saved") from None
    return _result(folder, failure)


def _launch_config(task: Task, node: Node, folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    run = task.run
    alone = run.nodes == 1
    assert alone or node.rendezvous is not None, "the command line asks for it"
    # the first rank keeps the terminal, the others write into files
    redirects = {rank: Std.ALL for rank in range(1, run.processes or 1)}
    settings: dict[str, Any] = {"shutdown_timeout": SAVING_SECONDS}  # newer than torch 2.11
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=run.nodes,
        max_nodes=run.nodes,
        nproc_per_node=run.processes or 1,
        run_id=str(uuid.uuid4()) if alone else run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if alone else str(node.rendezvous),
        rdzv_configs={} if alone else {"is_host": str(node.rank == 0)},
        local_addr="127.0.0.1" if alone else None,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=redirects),
        **{name: value for name, value in settings.items() if name in known},
    )


def _for_ranks(task: Task) -> dict[str, str]:
    """What the ranks' environment gets."""
    from drivetrain.hardware import loopback, usable_cores

    wanted = {"OMP_NUM_THREADS": str(max(1, usable_cores() // (task.run.processes or 1)))}
    interface = loopback() if task.run.nodes == 1 else None
    if interface is not None:  # gloo looks the host's name up otherwise, which fails on some machines
        wanted["GLOO_SOCKET_IFNAME"] = interface
    return wanted


def _result(folder: Path, failure: ChildFailedError | None) -> Result:
    """The result of this node's first rank, or the failure that came first."""
    ended = outcomes(folder)
    bad = [outcome for outcome in ended if outcome.kind != "done"]
    told = {outcome.rank for outcome in ended}
    for rank, code in _exit_codes(failure).items():
        if rank not in told:
            raise RankError(f"rank {rank} {_ended(code)}{_last_words(folder, rank, code)}")
    if bad:
        raise raised(cause_of(bad))
    if not ended:
        raise RankError(f"no rank said how it ended: {failure}")
    first = ended[0]
    assert first.result is not None, "whoever is not bad is done"
    return first.result.model_copy(update={"of_first": first.rank == 0})


def _exit_codes(failure: ChildFailedError | None) -> dict[int, int]:
    """Rank → exit code, of those that failed; the SIGTERM that follows another's failure is left out."""
    if failure is None:
        return {}
    codes = {rank: process.exitcode for rank, process in failure.failures.items()}
    return {rank: code for rank, code in codes.items() if code not in (0, -signal.SIGTERM)}


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} by itself"


def _last_words(folder: Path, rank: int, code: int) -> str:
    """What else can be said: the end of the rank's log (the first one's went to the screen)."""
    for log in folder.glob(f"logs/**/{rank}/stderr.log"):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f": {lines[-1][:200]}"
    return "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
