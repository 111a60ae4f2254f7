"""Works off many blocks, each of which becomes a file of arrays: in several processes where that pays, with progress.

A block's file is complete or absent. After a kill the next builder takes the existing ones, so that the arrays are the
same as without a kill.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, replaced_when_whole, stored
from drivetrain.data.byte_lengths import is_of_transformers
from drivetrain.data.mapped import READ_PAGES
from drivetrain.errors import RunError, UserError
from drivetrain.memory.garbage import importing, own_process, rarer
from drivetrain.runtime.progress_line import ProgressLine

BLOCK_BYTES, BLOCK_TEXTS = 2 << 20, 4096  # of one call of a tokenizer, whose result is Python's objects
PROCESS_SECONDS = 5.0  # a process pays for each so many seconds of work that one has left: it takes seconds to start
MEASURED = 1.0  # seconds, of which the rate of one process is taken
NUMBER = 8  # bytes of a block's number between processes
REFUSED = 3  # exit code of a process that met what the builder reports in words


class Work(Protocol):
    """Everything that a worker process needs."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def folder(self) -> Path:
        """The folder of the blocks' files."""
        ...

    def make(self, number: int) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True)
class TextBlocks:
    """Blocks of texts to tokenise. tokens_of: a function of the first text and the one behind the last that returns
    their arrays, of which `lengths` has the number of tokens of each text; it is pickled for other processes."""

    tokenizer: Any
    folder: Path
    blocks: Sequence[tuple[int, int]]
    tokens_of: Callable[[int, int], Mapping[str, np.ndarray]]

    def make(self, number: int) -> Mapping[str, np.ndarray]:
        return self.tokens_of(*self.blocks[number])


def stored_blocks(
    place: tuple[Path, str],
    tokenizer: Any,
    tokens_of: Callable[[int, int], Mapping[str, np.ndarray]],
    sizes: Callable[[], np.ndarray],
    room: Callable[[np.ndarray], int],
    facts: Mapping[str, Callable[[list[np.ndarray]], Any]] | None = None,
) -> tuple[Store, str | None]:
    """Returns the store of all texts' tokens, made once a machine, and a warning if the cache cannot be used.

    place: the cache's folder, and the store's name in it. sizes: bytes of each text; room: a function from these to the
    bytes that the work takes on the disk. Both are called only if there is something to make. tokens_of, facts: as in
    `TextBlocks` and `joined`.
    """

    def build(folder: Path) -> None:
        each = sizes()
        check_room(folder, room(each), f"tokenising {len(each):,} texts")
        blocks = blocks_of(each)
        worked_off(TextBlocks(tokenizer, folder, blocks, tokens_of), bytes_of(each, blocks))
        joined(folder, len(blocks), facts)

    return stored(*place, build)


def worked_off(work: Work, sizes: np.ndarray) -> None:
    """Makes each block whose file is missing. sizes: bytes of text of each block."""
    left = [number for number in range(len(sizes)) if not block_file(work.folder, number).exists()]
    before = int(sizes.sum()) - int(sizes[left].sum())
    shown = ProgressLine("tokenising", int(sizes.sum()), before)
    for number in _finished(work, left, sizes):
        shown.add(int(sizes[number]))
    shown.end()


def blocks_of(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first text of each block, and the one behind its last; one empty block for no texts. sizes: bytes of
    each."""
    blocks, start = [], 0
    ends = np.cumsum(sizes)
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + BLOCK_TEXTS)
        blocks.append((start, stop))
        start = stop
    return blocks or [(0, 0)]


def bytes_of(sizes: np.ndarray, blocks: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the bytes of each block, (B,) int64."""
    return np.array([sizes[start:stop].sum() for start, stop in blocks], np.int64)


def joined(folder: Path, count: int, facts: Mapping[str, Callable[[list[np.ndarray]], Any]] | None = None) -> None:
    """Joins the blocks' arrays into a store, one block after the other. `lengths` become `offsets`.

    facts: for each array that becomes a fact of the store instead, a function of those of all blocks. The blocks are
    removed when the store is finished.
    """
    facts = facts or {}
    apart: dict[str, list[np.ndarray]] = {name: [] for name in facts}
    with Writer(folder) as writer:
        for number in range(count):
            with np.load(block_file(folder, number), allow_pickle=False) as held:
                for name in held.files:
                    values = held[name]
                    if name in apart:
                        apart[name].append(values)
                    elif name == "lengths":
                        if number == 0:
                            writer.append("offsets", np.zeros(1, np.int64))
                        writer.append_ends("offsets", values)
                    else:
                        writer.append(name, values)
        writer.finish({name: made(apart[name]) for name, made in facts.items()})
    remove_blocks(folder)


def remove_blocks(folder: Path) -> None:
    """Removes the blocks' files, and half-written ones of killed processes."""
    for file in folder.glob("block-*"):
        file.unlink()


def block_file(folder: Path, number: int) -> Path:
    return folder / f"block-{number}.npz"


def make_block(work: Work, number: int) -> None:
    made = work.make(number)
    with replaced_when_whole(block_file(work.folder, number)) as aside, aside.open("wb") as opened:
        np.savez(opened, allow_pickle=False, **made)
    READ_PAGES.release()  # of the rows: else a process ends with all that it read in its memory


# --- processes -------------------------------------------------------------------------------------------------------


def _finished(work: Work, left: Sequence[int], sizes: np.ndarray) -> Iterator[int]:
    """Yields the numbers of blocks as they are finished: made here, until their rate says that processes pay."""
    travels = is_of_transformers(work.tokenizer)
    start, done = time.monotonic(), 0
    for place, number in enumerate(left):
        spent = time.monotonic() - start
        if travels and spent >= MEASURED:
            remaining = spent / done * int(sizes[left[place:]].sum()) if done else math.inf
            processes = int(min(len(os.sched_getaffinity(0)), len(left) - place, remaining / PROCESS_SECONDS))
            if processes > 1:
                yield from _in_processes(work, left[place:], processes)
                return
        make_block(work, number)
        done += int(sizes[number])
        yield number


def _in_processes(work: Work, left: Sequence[int], processes: int) -> Iterator[int]:
    """Works in this process and in others beside it; each takes the next block when it is done with one."""
    numbers = np.array(left, np.int64).tobytes()
    with (
        _one_thread(),
        _file_of(work.folder, numbers) as queue,
        _helpers(work, queue, processes - 1) as (helpers, finished),
    ):
        os.set_blocking(finished.fileno(), False)
        for number in _taken(queue.fileno()):
            make_block(work, number)
            yield number
            yield from _reported(finished)
        os.set_blocking(finished.fileno(), True)
        while found := list(_reported(finished)):
            yield from found
        codes = [helper.wait() for helper in helpers]
        if REFUSED in codes:  # made here, the block raises the error itself
            for number in left:
                if not block_file(work.folder, number).exists():
                    make_block(work, number)
                    yield number
        elif failed := [code for code in codes if code]:
            raise RunError(f"a process that tokenised ended with code {failed[0]}; what it printed stands above")


@contextmanager
def _helpers(work: Work, queue: IO[bytes], count: int) -> Iterator[tuple[list[subprocess.Popen[bytes]], IO[bytes]]]:
    """Starts Python processes that take blocks from the queue; gives them, and the pipe into which they report blocks.

    A fork would copy threads' locks, and `spawn` imports the user's main file.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    number = queue.fileno()
    command = [sys.executable, "-m", __name__, str(number)]
    helpers: list[subprocess.Popen[bytes]] = []
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as finished:
        try:
            with open(writing, "wb") as reports:
                for _ in range(count):
                    with _file_of(work.folder, pickle.dumps(work)) as given:  # a pipe would wait until it is read
                        process = subprocess.Popen(
                            command, stdin=given, stdout=reports, env=environment, pass_fds=[number]
                        )
                    helpers.append(process)
            yield helpers, finished
        finally:
            for helper in helpers:
                if helper.poll() is None:
                    helper.terminate()
                helper.wait()


@contextmanager
def _one_thread() -> Iterator[None]:
    """While the block runs, tokenizers of this process, and of those it starts, take one thread each: their threads
    wait for each other by spinning, which costs half as much again where other processes have the cores."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _file_of(folder: Path, content: bytes) -> Iterator[IO[bytes]]:
    """Gives an open file that no name leads to."""
    with tempfile.TemporaryFile(dir=folder) as opened:
        opened.write(content)
        opened.seek(0)
        yield opened


def _taken(queue: int) -> Iterator[int]:
    """Yields numbers of the file, whose position all processes share, until all are taken."""
    while content := os.read(queue, NUMBER):
        yield int.from_bytes(content, sys.byteorder)


def _reported(finished: IO[bytes]) -> Iterator[int]:
    """Yields the numbers that processes reported since the last call; none at the end."""
    content = finished.read(NUMBER * 1024)
    for place in range(0, len(content or b""), NUMBER):
        yield int.from_bytes(content[place : place + NUMBER], sys.byteorder)


def _work_off() -> None:
    with importing():
        work = pickle.load(sys.stdin.buffer)
    with rarer():
        for number in _taken(int(sys.argv[1])):
            try:
                make_block(work, number)
            except (UserError, OSError):  # OSError: of a full disk, which the builder reports with the folder's name
                sys.exit(REFUSED)
            # ends this process once the builder is gone: the pipe has no reader
            os.write(1, number.to_bytes(NUMBER, sys.byteorder))


if __name__ == "__main__":
    own_process()
    _work_off()
