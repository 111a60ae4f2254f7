"""Traces runs in processes of their own, so that a search that knows what it will ask next has it sooner.

A trace is Python alone, of which one process computes on one core. Each process here reads the data itself and traces
one run at a time; the caller traces beside them, what none of them has begun. What a process cannot trace, the caller
traces again, who then meets the reason.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.memory.garbage import importing, own_process
from drivetrain.memory.limit import attainable_memory
from drivetrain.plan.deep_trace import Pairs, Tracer
from drivetrain.plan.samples import Samples, standing_for
from drivetrain.plan.step_costs import StepCosts
from drivetrain.runtime.hardware import usable_cores

MOST = 4  # traces beside each other, of which the caller takes one
BYTES = 2**31  # of memory that is there for each: one takes half of it, and the data of the run
# watches its parent before it imports PyTorch, which takes a while
PROGRAM = """
from drivetrain.runtime.signals import end_with_parent
end_with_parent({parent})
from drivetrain.plan.trace_processes import work_off
work_off()
"""


@dataclass(frozen=True)
class Asked:
    """A trace to take. pairs: what the caller knows of the depths to trace. stands_for: of how many samples the data
    are taken for, as samples.py has it."""

    run: RunConfig
    machine: Machine
    quick: bool
    pairs: Pairs
    stands_for: int | None


@dataclass(frozen=True)
class Answer:
    """The costs, and what the tracer learned from the trace."""

    costs: StepCosts
    by_rank: Mapping[tuple[str, int], StepCosts]
    pairs: Pairs
    notes: tuple[str, ...]


@contextmanager
def tracing_processes() -> Iterator[TraceProcesses | None]:
    """Gives as many processes as the machine has cores and memory for beside the caller; None where it has for none."""
    count = min(MOST, usable_cores(), attainable_memory() // BYTES) - 1
    processes = TraceProcesses(count) if count > 0 else None
    try:
        yield processes
    finally:
        if processes is not None:
            processes.close()


class TraceProcesses:
    """Processes that trace. They start when the first trace is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: queue.SimpleQueue[tuple[Asked, Future[Answer | None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock, self._is_closed = threading.Lock(), False

    @property
    def count(self) -> int:
        return self._count

    def ask(self, asked: Asked) -> Future[Answer | None]:
        """Queues a trace, whose result is None where the process could not take it."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(self._count)]
            for thread in self._threads:
                thread.start()
        future: Future[Answer | None] = Future()
        self._asked.put((asked, future))
        return future

    def answer(self, future: Future[Answer | None]) -> Answer | None:
        """Returns the result of a trace; None as well where no process has begun it: the caller is quicker then."""
        return None if future.cancel() else future.result()

    def not_begun(self) -> Asked | None:
        """Takes a trace back that no process has begun; None if there is none."""
        with suppress(queue.Empty):
            while (item := self._asked.get_nowait()) is not None:
                if item[1].cancel():
                    return item[0]
        return None

    def close(self) -> None:
        """Ends the processes, in the middle of a trace too."""
        with self._lock:
            self._is_closed = True
            running = [*self._processes]
        for _ in self._threads:
            self._asked.put(None)
        for process in running:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in running:
            process.communicate()  # closes its pipes

    def _drive(self) -> None:
        """Gives one process its traces, in a thread, until the end of the queue."""
        process = self._started()
        while (item := self._asked.get()) is not None:
            asked, future = item
            if future.set_running_or_notify_cancel():
                future.set_result(None if process is None else _answered(process, asked))

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Starts a process, and waits until it has imported what it needs. Returns None where it cannot."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-c", PROGRAM.format(parent=os.getpid())], subprocess.PIPE
        with self._lock:
            if self._is_closed:
                return None
            try:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
            except OSError:
                return None
            self._processes.append(process)
        return process if _received(process) is not None else None


def _answered(process: subprocess.Popen[bytes], asked: Asked) -> Answer | None:
    assert process.stdin is not None
    try:
        pickle.dump(asked, process.stdin)
        process.stdin.flush()
    except (OSError, pickle.PicklingError, TypeError, AttributeError):  # it ended, or a part of the run is not pickled
        return None
    found = _received(process)
    return found if isinstance(found, Answer) else None


def _received(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):  # it ended
        return None


# --- in the process --------------------------------------------------------------------------------------------------


def work_off() -> None:
    """Traces what stands in the standard input, until that ends. Runs in a process of its own."""
    own_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the search, which ends this
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print would stand between the answers
    with importing():
        import drivetrain.plan.trace  # noqa: F401
    samples = Samples()
    _send(answers, "ready")
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(answers, _traced(asked, samples))


def _send(answers: Any, answer: Any) -> None:
    pickle.dump(answer, answers)
    answers.flush()


def _traced(asked: Asked, samples: Samples) -> Answer | None:
    tracer = Tracer(pairs=asked.pairs)
    try:
        with standing_for(asked.stands_for):
            workload = samples.of(asked.run)
        costs = tracer.fullest_step_costs(asked.run, asked.machine, workload, asked.quick)
    except Exception:  # the caller traces it again, and reports the reason
        return None
    return Answer(costs, tracer.found, tracer.pairs, tuple(tracer.notes))
