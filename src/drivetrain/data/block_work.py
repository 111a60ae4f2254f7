"""Work of many blocks, each of which becomes a file of arrays: in several processes where that pays, and shown.

A block's file is there whole or not at all. After a kill the next builder takes those that are there, so that the
arrays are the same as if there had been none.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drivetrain.data.array_store import replaced_when_whole
from drivetrain.errors import RunError

PROCESS_BYTES = 64 << 20  # for each so many a further process pays: it takes seconds to start
SAID_EVERY = 10.0  # seconds, where no terminal shows a line that changes


class Work(Protocol):
    """All that a process needs."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def folder(self) -> Path:
        """Where the blocks' files lie."""
        ...

    def make(self, number: int) -> Mapping[str, np.ndarray]: ...


def worked_off(work: Work, sizes: np.ndarray) -> None:
    """Make each block whose file is not there. sizes: bytes of text of each block."""
    left = [number for number in range(len(sizes)) if not block_file(work.folder, number).exists()]
    shown = _Progress(sizes, left)
    for number in _finished(work, left, int(sizes.sum())):
        shown.finished(number)
    shown.end()


def block_file(folder: Path, number: int) -> Path:
    return folder / f"block-{number}.npz"


def make_block(work: Work, number: int) -> None:
    with replaced_when_whole(block_file(work.folder, number)) as aside, aside.open("wb") as opened:
        np.savez(opened, allow_pickle=False, **work.make(number))


# --- processes -------------------------------------------------------------------------------------------------------


def _finished(work: Work, left: Sequence[int], size: int) -> Iterator[int]:
    """The numbers of blocks as they are finished."""
    processes = min(len(os.sched_getaffinity(0)), size // PROCESS_BYTES, len(left))
    if processes < 2 or not type(work.tokenizer).__module__.startswith("transformers."):  # else it may not travel
        for number in left:
            make_block(work, number)
            yield number
        return
    yield from _in_processes(work, left, processes)


def _in_processes(work: Work, left: Sequence[int], processes: int) -> Iterator[int]:
    """Python processes of their own: a fork would copy threads' locks, and `spawn` imports the user's main file."""
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", __name__]
    workers = []
    reading, writing = os.pipe()
    try:
        for number in range(processes):
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, env=environment)
            workers.append(worker)
            assert worker.stdin is not None
            with worker.stdin:
                pickle.dump((work, left[number::processes]), worker.stdin)
        os.close(writing)
        with os.fdopen(reading, encoding="ascii") as finished:
            yield from map(int, finished)
        if failed := [code for worker in workers if (code := worker.wait())]:
            raise RunError(f"a process that tokenised ended with code {failed[0]}; what it printed stands above")
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
            worker.wait()


def _work_off() -> None:
    work, numbers = pickle.load(sys.stdin.buffer)
    for number in numbers:
        make_block(work, number)
        os.write(1, f"{number}\n".encode())  # ends this process once the builder is gone: nobody reads


# --- what a user sees ------------------------------------------------------------------------------------------------


class _Progress:
    """A line that says how far it is, for work that takes longer than two seconds."""

    def __init__(self, sizes: np.ndarray, left: Sequence[int]) -> None:
        self._bytes = sizes
        self._all = int(sizes.sum())
        self._done = self._before = self._all - int(sizes[list(left)].sum())
        self._start = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def finished(self, number: int) -> None:
        self._done += int(self._bytes[number])
        now = time.monotonic()
        if now - self._start < 2 or now - self._last < (0.5 if self._terminal else SAID_EVERY):
            return
        self._last = now
        rate = (self._done - self._before) / (now - self._start)
        remaining = int((self._all - self._done) / max(rate, 1))
        line = (
            f"tokenising: {self._done / 1e6:,.0f} of {self._all / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
            f"{remaining // 60} min {remaining % 60} s left"
        )
        print(
            f"\r{line}   " if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True
        )
        self._shown = True

    def end(self) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)


if __name__ == "__main__":
    _work_off()
