"""Starts the ranks, and starts them again from the newest good checkpoint when one dies.

A death is an end without an explanation: a signal, an exit without an error, a peer that was lost. A user's error, a
failed run and a rank's own exception would only repeat, and end the run. After a micro-batch that did not fit the ranks
start with half of it, which does not count as a death.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from drivetrain.config.micro_batch_backoff import AUTO, reduced, reduction
from drivetrain.config.run import RunConfig
from drivetrain.errors import OutOfMemory, RankError
from drivetrain.launch.batch_size_finder import fitted
from drivetrain.launch.elastic import Died, Killed, devices_left, one_attempt
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.rank import TASK
from drivetrain.launch.rendezvous import Meeting
from drivetrain.runtime import scratch
from drivetrain.runtime.atomic_file import writing
from drivetrain.runtime.attempt import Attempt


class Place(Protocol):
    """Where the ranks run, which decides how an attempt is made."""

    def one_attempt(self, task: Job, folder: Path, meeting: Meeting, processes: int) -> Result: ...
    def devices_left(self, run: RunConfig) -> int: ...


class Here:
    """This machine, by torch elastic."""

    def one_attempt(self, task: Job, folder: Path, meeting: Meeting, processes: int) -> Result:
        return one_attempt(task, folder, meeting, processes)

    def devices_left(self, run: RunConfig) -> int:
        return devices_left(run)


def in_ranks(task: Job, node: Node) -> Result:
    """Does the task in separate processes, as often as its run allows."""
    with _launch(task, node) as (folder, meeting):
        if task.run.micro_batch_size == AUTO:
            task = fitted(task, folder, meeting)
        return _until_done(task, folder, meeting, Here())


def in_place(task: Job, place: Place) -> Result:
    """Does the task on another place's devices, which one launching process reaches all: they need no meeting of
    machines."""
    with _launch(task, Node(), alone=True) as (folder, meeting):
        return _until_done(task, folder, meeting, place)


def cut_to_fit(task: Job, node: Node) -> Job:
    """Returns the task with a number in place of `micro_batch_size: auto`."""
    if task.run.micro_batch_size != AUTO:
        return task
    with _launch(task, node) as (folder, meeting):
        return fitted(task, folder, meeting)


@contextmanager
def _launch(task: Job, node: Node, alone: bool = False) -> Iterator[tuple[Path, Meeting]]:
    with writing("the temporary folder", then="start again"):
        own = scratch.make()
    with own as folder:
        yield folder, Meeting(task.run.model_copy(update={"nodes": 1}) if alone else task.run, node)


def _until_done(task: Job, folder: Path, meeting: Meeting, place: Place) -> Result:
    since, causes, processes, run = time.monotonic(), list[str](), task.run.processes or 1, task.run
    while True:
        with writing(folder):
            (folder / TASK).write_text(task.model_dump_json(), encoding="utf-8")
            Attempt(since, task.max_restarts, causes, folder, reduction(task.run, run)).write()
        try:
            return place.one_attempt(task, folder, meeting, processes)
        except OutOfMemory as shortage:
            smaller = reduced(run, shortage.samples, shortage.tokens) if task.verb == "train" else None
            if smaller is None:
                meeting.give_up()
                raise
            run = smaller
            meeting.try_smaller()
            message = f"{shortage}. Going on with micro-batches of at most {run.micro_batch}"
            task = task.model_copy(update={"notices": [*task.notices, message]})
        except Died as death:
            if not meeting.tries_smaller():
                causes.append(str(death))
            if len(causes) > task.max_restarts:
                meeting.give_up()
                raise _for_good(causes, death) from None
        except BaseException:
            meeting.give_up()
            raise
        meeting.part()
        processes = place.devices_left(task.run)
        if not processes:
            if not meeting.goes_on_without():  # else the others would wait for this node
                meeting.give_up()
            why = causes[-1] if causes else "the ranks were ended to start again"
            raise RankError(f"{why}; and no device is left on this machine to start again on")


def _for_good(causes: Sequence[str], last: Died) -> RankError:
    if isinstance(last, Killed):
        from drivetrain.memory.shortage import LESS

        last = type(last)(f"{last}. Try fewer processes, engine.meta=true with engine=fsdp, {LESS}", last.traceback)
    if len(causes) == 1:
        return last
    earlier = "; ".join(f"{number}. {cause}" for number, cause in enumerate(causes[:-1], start=1))
    message = f"{last}. It was started {len(causes)} times, as max_restarts={len(causes) - 1} allows; before: {earlier}"
    return RankError(message, last.traceback)
