"""A mutant in this process or in one of its own, and what is wrong with its answer."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from drivetrain.cli import main
from drivetrain.compare import verbs
from drivetrain.errors import RunError
from drivetrain.launch import execute, restarts
from drivetrain.launch.job import Job, Result
from tests.fuzz.mutants import READS_ONLY, Mutant, apply
from tests.fuzz.place import contents, copied

CODES = {0, 1, 2, 130, 143}
SECONDS = 30  # of one mutant on a busy machine
MEMORY = 8 * 2**30  # bytes that one may take above what there is
MOST_STEPS = 8
MOST_SAID = 200_000  # characters: no answer is longer than the JSON Schema


@dataclass
class Answer:
    mutant: Mutant
    code: object
    out: str
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.mutant}\n  {'; '.join(self.faults)}\n{self.out[-3000:]}"


class TooLong(BaseException):
    """Raised by the alarm within whatever hangs."""


def in_process(mutant: Mutant, template: Path, folder: Path) -> Answer:
    """Through drivetrain.cli.main. Several ranks, long trainings and cells are not started."""
    copied(template, folder)
    with contextlib.chdir(folder):
        apply(mutant)
        before = contents(folder)
        text = io.StringIO()
        code: object = None
        faults = []
        try:
            with stubs(), bounded(), _captured(text):
                main(mutant.arguments)
        except SystemExit as ended:
            code = 0 if ended.code is None else ended.code
        except TooLong:
            faults.append(f"took more than {SECONDS} seconds")
            traceback.print_exc(file=text)
        except BaseException:
            traceback.print_exc(file=text)
        answer = Answer(mutant, code, text.getvalue(), faults)
        return judged(answer, before, contents(folder), folder)


def in_a_process(mutant: Mutant, template: Path, folder: Path) -> Answer:
    """Through the real command."""
    copied(template, folder)
    with contextlib.chdir(folder):
        apply(mutant)
        before = contents(folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(folder / "home")}
    command = [sys.executable, "-m", "drivetrain", *mutant.arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=6 * SECONDS)
            answer = Answer(mutant, process.returncode, out.decode("utf-8", "replace"))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            answer = Answer(mutant, None, out.decode("utf-8", "replace"), [f"took more than {6 * SECONDS} seconds"])
    return judged(answer, before, contents(folder), folder)


def judged(answer: Answer, before: dict[str, str], after: dict[str, str], folder: Path) -> Answer:
    if "Traceback (most recent call last)" in answer.out:
        answer.faults.append("a traceback")
    if answer.code not in CODES:
        answer.faults.append(f"exit code {answer.code}")
    if len(answer.out) > MOST_SAID:
        answer.faults.append(f"said {len(answer.out):,} characters")
    lost = [name for name, held in before.items() if after.get(name) != held and not _may_change(name, answer.mutant)]
    if lost:
        answer.faults.append(f"changed or deleted {', '.join(lost[:5])}")
    shutil.rmtree(folder)
    return answer


def _may_change(name: str, mutant: Mutant) -> bool:
    """Returns what a verb is there to write: a training its run's folder, an import the file that it may overwrite."""
    if mutant.verb in READS_ONLY:
        return False
    if mutant.verb == "import" and "--overwrite" in mutant.arguments:
        return name in mutant.arguments or name.endswith("-run.yaml")
    if mutant.verb == "report":  # --output DIR adds its files there
        return name.startswith("comparison.") or "/comparison." in name
    return mutant.verb in ("train", "compare", "checkpoint convert") and name.split("/")[0] in ("runs", "folder")


# --- what is not started, and bounds ---------------------------------------------------------------------------------


@contextlib.contextmanager
def stubs() -> Iterator[None]:
    real = execute.perform

    def short(task: Job, *rest: Any, **named: Any) -> Result:
        loop = task.run.loop
        if task.verb == "train" and (loop.epochs or 0) + (loop.steps or 0) > MOST_STEPS:
            raise RunError("a long training is not started here")
        return real(task, *rest, **named)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RunError("no process is started here")

    with (
        patch.object(execute, "perform", short),
        patch.object(restarts, "in_ranks", refuse),
        patch.object(restarts, "_launch", refuse),
        patch.object(verbs, "run_matrix", refuse),
    ):
        yield


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Time, memory and the process's state: a verb may change what the next one finds."""
    here = threading.main_thread() is threading.current_thread()
    assert here, "the alarm is for the main thread"

    def ring(_: int, __: FrameType | None) -> None:
        raise TooLong

    old = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    environment = dict(os.environ)
    path = list(sys.path)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path


@contextlib.contextmanager
def _captured(text: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield
