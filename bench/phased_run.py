"""A training in a forked process, which says at each instant what it is doing: for benches that kill it then.

The fork is made by a process that has imported everything and computed nothing, so that a start takes tenths of a
second. What is under way is a number in memory that both share.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# what is under way → the functions, by module and name, which are that; the outermost one counts
CACHING, DRAWING, REWARDS = "caching the reference", "drawing answers", "rewards"
PHASES: dict[str, Sequence[tuple[str, str]]] = {
    CACHING: [("drivetrain.training.precompute", "_compute")],
    DRAWING: [
        ("drivetrain.workloads.policy", "drawn_answers"),
        ("drivetrain.workloads.own_answers", "drawn_answers"),
    ],
    REWARDS: [("drivetrain.workloads.rewarding", "Rewarding.values")],
    "log-probabilities of answers": [("drivetrain.generation.passes", "Passes.each")],
    "update": [
        ("drivetrain.engines.autograd", "AutogradEngine.forward_backward"),
        ("drivetrain.engines.autograd", "AutogradEngine.optimizer_step"),
    ],
    "saving": [("drivetrain.training.run_checkpoints", "RunCheckpoints.save")],
}
STARTING, BETWEEN = "starting", "between these"
IMPORTED = (
    "drivetrain.cli.train", "drivetrain.launch.start", "drivetrain.launch.execute", "drivetrain.launch.restarts",
    "drivetrain.training.run", "drivetrain.engines.single", "drivetrain.workloads.policy", "drivetrain.workloads.ppo",
    "drivetrain.workloads.own_answers", "drivetrain.workloads.preference", "drivetrain.generation.cache",
    "drivetrain.workloads.text_batches", "transformers.models.llama.modeling_llama",
)  # fmt: skip
_NAMES = list(PHASES)
_RECORD = struct.Struct("=id")  # of each phase: how often it began, and seconds in it; before them: the one under way
_HEAD = struct.Struct("=ii")  # the phase under way, 0 for none; how many have begun


class Shared:
    """The memory that says what is under way. One process writes it.

    file: where others that are no forks of this process find it; it is made if it is not there.
    """

    def __init__(self, file: Path | None = None) -> None:
        size = _HEAD.size + _RECORD.size * len(_NAMES)
        if file is None:
            self._memory = mmap.mmap(-1, size)
            return
        with file.open("r+b" if file.exists() else "w+b") as opened:
            opened.truncate(size)
            self._memory = mmap.mmap(opened.fileno(), size)

    def now(self) -> str:
        phase, begun = _HEAD.unpack_from(self._memory)
        return _NAMES[phase - 1] if phase else BETWEEN if begun else STARTING

    def begun(self, phase: str) -> int:
        return int(self._read(_NAMES.index(phase))[0])

    def mean_seconds(self, phase: str) -> float:
        count, seconds = self._read(_NAMES.index(phase))
        return float(seconds / count) if count else 0.0

    def _read(self, number: int) -> tuple[Any, ...]:
        return _RECORD.unpack_from(self._memory, _HEAD.size + number * _RECORD.size)

    def begin(self, number: int) -> bool:
        """Returns whether no other phase is under way, of which this one is a part."""
        phase, begun = _HEAD.unpack_from(self._memory)
        if phase:
            return False
        count, seconds = self._read(number)
        _RECORD.pack_into(self._memory, _HEAD.size + number * _RECORD.size, count + 1, seconds)
        _HEAD.pack_into(self._memory, 0, number + 1, begun + 1)
        return True

    def end(self, number: int, seconds: float) -> None:
        count, before = self._read(number)
        _RECORD.pack_into(self._memory, _HEAD.size + number * _RECORD.size, count, before + seconds)
        _HEAD.pack_into(self._memory, 0, 0, _HEAD.unpack_from(self._memory)[1])


class PhasedRun:
    """`drivetrain words` in a folder, under way. number: of the start, which notes of what is asked for begin with."""

    def __init__(self, words: Sequence[str], folder: Path, number: int, environment: Mapping[str, str]) -> None:
        self.shared = Shared()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(words, folder, {**environment, "RUN_START": str(number)}, self.shared)

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"it has not ended after {seconds:g} s")
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """Kills it alone: the processes of its rewards have to notice by themselves."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._code = -signal.SIGKILL


def imported() -> None:
    """Imports all that a run may need, so that a fork has it. It computes on one thread, since a fork has not the
    helper threads that OpenMP believes to be there, and would wait for them for ever."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def _run(words: Sequence[str], folder: Path, environment: Mapping[str, str], shared: Shared) -> None:
    """Does not return."""
    code = 1
    try:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= environment
        mark(shared)
        importlib.import_module("drivetrain.cli").main(list(words))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def mark(shared: Shared) -> None:
    """From now on this process says there what it does, and keeps account of the answers that it draws."""
    for number, places in enumerate(PHASES.values()):
        for module, name in places:
            _replace(module, name, functools.partial(_marked, number=number, shared=shared))
    _replace("drivetrain.generation.passes", "Passes.answers", _noted)


def _replace(module: str, name: str, change: Callable[[Any], Any]) -> None:
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, last, change(getattr(owner, last)))


def _marked(function: Callable[..., Any], number: int, shared: Shared) -> Callable[..., Any]:
    """Returns the function, which says when it is under way. One that an error ends, as where another rank is lost,
    stays the last that was: it has not done its work."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if not shared.begin(number):
            return function(*args, **kwargs)
        began = time.monotonic()
        result = function(*args, **kwargs)
        shared.end(number, time.monotonic() - began)
        return result

    return marked


def _noted(answers: Callable[..., Any]) -> Callable[..., Any]:
    """Appends a line for each call, with the numbers of the draws that are asked for."""

    @functools.wraps(answers)
    def noted(self: Any, prompts: Any, draws: Sequence[int], *others: Any) -> Any:
        if draws:
            with open(os.environ["ANSWER_CALLS"], "ab", buffering=0) as calls:
                calls.write(json.dumps([int(os.environ["RUN_START"]), list(draws)]).encode() + b"\n")
        return answers(self, prompts, draws, *others)

    return noted
