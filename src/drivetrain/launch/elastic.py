"""Runs one attempt of a run's ranks on this machine: torch elastic starts them, and their failures are reported
once."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.config.run import RunConfig
from drivetrain.errors import RankError, RunError
from drivetrain.launch.diagnostics.hang_report import last_sizes
from drivetrain.launch.diagnostics.stack_request import forget, pulses
from drivetrain.launch.diagnostics.watchdog import Watch, left_quietly, seen
from drivetrain.launch.job import Job, Result, lost
from drivetrain.launch.outcome import RankOutcome, cause_of, clear, outcomes, raised
from drivetrain.launch.rendezvous import Meeting
from drivetrain.launch.variables import RECORDER, variables
from drivetrain.memory.garbage import importing

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


class Died(RankError):
    """A rank ended and no error explains it: another attempt may succeed."""


class Killed(Died):
    """A rank was ended by SIGKILL, which nothing here sent: most likely by the kernel, for want of memory."""


class Hung(Died):
    """Ranks that did not go on were ended."""


def one_attempt(task: Job, folder: Path, meeting: Meeting, processes: int) -> Result:
    """Returns the result of this machine's first rank. Raises Died, or the failure that came first."""
    with importing():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
        from torch.distributed.launcher.api import elastic_launch

    failure: ChildFailedError | None = None
    unreachable: RendezvousError | None = None
    clear(folder)
    forget(folder)
    _quieten_elastic()
    with variables(environment_of_ranks(task, processes)), Watch(folder, task.run, meeting) as watch:
        try:
            command = ("-m", "drivetrain.launch.rank", str(folder), str(os.getpid()))
            elastic_launch(_launch_config(task.run, folder, meeting, processes), sys.executable)(*command)
        except ChildFailedError as error:
            failure = error
        except RendezvousClosedError:
            raise Died("the other nodes had parted already") from None
        except RendezvousError as error:
            unreachable = error
        except SignalException as stopped:
            if not any(outcome.kind == "done" for outcome in outcomes(folder)):  # before they could save
                if stopped.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise RankError(f"ended by {signal.Signals(stopped.sigval).name}{lost(task)}") from None
    # a rank here fails at once when those of another machine are ended
    hang = watch.hang or ("" if failure is None else meeting.hang())
    if hang:
        raise Hung(hang)
    if unreachable is not None:  # and not because the first node has ended its ranks, and is gone
        raise RunError(meeting.unreachable(unreachable)) from unreachable
    _pass_on(failure, meeting)
    return result_of(folder, {} if failure is None else failure.failures)


def _quieten_elastic() -> None:
    """Silences torch elastic's loggers, each of which has a level of its own: failures are reported once, by us."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def devices_left(run: RunConfig) -> int:
    """Returns the number of ranks that this machine can still start: a GPU may have gone with the rank that died."""
    from drivetrain.runtime.hardware import detect

    wanted = run.processes or 1
    if detect(run.device).device != "cuda":
        return wanted
    # asked in a process of its own: this one remembers how many there were
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return min(wanted, int(done.stdout)) if done.returncode == 0 else wanted


def _launch_config(run: RunConfig, folder: Path, meeting: Meeting, processes: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    # the first rank keeps the terminal, the others write into files
    redirects = {rank: Std.ALL for rank in range(1, processes)}
    settings: dict[str, Any] = {"shutdown_timeout": run.grace_seconds}  # newer than torch 2.11
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(
        nproc_per_node=processes,
        rdzv_backend="c10d",
        max_restarts=0,  # ours are counted in restarts.py, which tells a death from a mistake
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=redirects),
        **meeting.settings(),
        **{name: value for name, value in settings.items() if name in known},
    )


def environment_of_ranks(task: Job, processes: int) -> dict[str, str]:
    """Returns the ranks' environment. A run of one process has the machine to itself, as without a launcher."""
    from drivetrain.memory.allocator import growing_segments
    from drivetrain.runtime.hardware import loopback, usable_cores

    wanted = {} if task.run.world_size == 1 else {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
    wanted |= RECORDER
    wanted |= growing_segments() if task.run.allocator != "system" else {}
    interface = loopback() if task.run.nodes == 1 else None
    if interface is not None:  # gloo looks the host's name up otherwise, which fails on some machines
        wanted["GLOO_SOCKET_IFNAME"] = interface
    return wanted


def _pass_on(failure: ChildFailedError | None, meeting: Meeting) -> None:
    """Sends the other nodes a failure here, including a rank that ended without an error."""
    if failure is not None and failure.failures:
        meeting.tell_failure(f"rank {min(failure.failures)}")


def result_of(folder: Path, failures: Mapping[int, Any]) -> Result:
    """Returns the result of the first rank whose outcome lies in a folder, or raises the failure that came first.

    failures: exitcode, and timestamp by the wall clock, of each rank that ended badly.
    """
    ended = outcomes(folder)
    bad = [outcome for outcome in ended if outcome.kind != "done"]
    explained = [outcome for outcome in bad if not outcome.lost]
    silent = _silent(failures, {outcome.rank for outcome in ended}, explained)
    if silent is not None:
        rank, code = silent
        known = [pulse for pulse in pulses(folder).values() if pulse.rank == rank]
        killed = code == -signal.SIGKILL
        why = f" (most likely by the kernel, because the machine's memory ran out{last_sizes(known)})" if killed else ""
        kind = Killed if killed else Died
        raise kind(f"rank {rank} {_ended(code)}{seen(next(iter(known), None))}{why}{_last_words(folder, rank)}")
    if explained:
        raise raised(cause_of(explained))
    if bad:
        quietly = left_quietly(folder, {outcome.rank: outcome.time for outcome in ended})
        if quietly is not None:
            raise Died(quietly)
        lost = cause_of(bad)
        raise Died(str(raised(lost)), lost.traceback)
    if not ended:
        raise Died("no rank reported how it ended")
    first = ended[0]
    assert first.result is not None, "whoever is not bad is done"
    return first.result.model_copy(update={"of_first": first.rank == 0})


def _silent(
    failures: Mapping[int, Any], reported: set[int], explained: Sequence[RankOutcome]
) -> tuple[int, int] | None:
    """Returns the rank that ended first without an error, and its exit code; None if another rank's error came before.

    SIGTERM follows another's failure, and SIGKILL after it for a rank that hangs; gloo aborts if a peer is gone.
    """
    if not failures:
        return None
    first_error = min((outcome.time for outcome in explained), default=float("inf"))
    zero = time.time() - time.monotonic()  # torch elastic stamps by the wall clock, ranks by one that is never set
    follows = {0, -signal.SIGTERM} | ({-signal.SIGABRT} if explained else set())
    found = [
        (process.timestamp, rank, process.exitcode)
        for rank, process in failures.items()
        if rank not in reported and process.exitcode not in follows and process.timestamp - zero <= first_error
    ]
    _, rank, code = min(found, default=(0, -1, 0))
    return (rank, code) if found else None


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} by itself"


def _last_words(folder: Path, rank: int) -> str:
    """Returns the end of the rank's log (the first one's went to the screen)."""
    logs = sorted(folder.glob(f"logs/**/{rank}/stderr.log"), key=lambda log: log.stat().st_mtime)
    for log in logs[-1:]:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f": {lines[-1][:200]}"
    return ""
