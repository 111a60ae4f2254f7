"""Texts of a store → tokens of a store, a block of texts at a time, in several processes where that pays.

Each block is a file that is there whole or not at all. After a kill the next builder takes those that are there, so
that the arrays are the same as if there had been none.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, default_root, replaced_when_whole, stored
from drivetrain.data.text_rows import TextRows
from drivetrain.data.token_cache import content_key
from drivetrain.data.tokenised import Tokens, tokenise_block
from drivetrain.errors import RunError

BLOCK_BYTES, BLOCK_TEXTS = 2 << 20, 4096  # of one call of the tokenizer, whose result is Python's objects
PROCESS_BYTES = 64 << 20  # for each so many a further process pays: it takes seconds to start
SAID_EVERY = 10.0  # seconds, where no terminal shows a line that changes


@dataclass(frozen=True)
class Work:
    """All that a process needs. indices: which rows, None for all."""

    tokenizer: Any
    rows: Store
    indices: np.ndarray | None
    max_length: int
    folder: Path
    blocks: Sequence[tuple[int, int]]  # first text and the one behind the last


def stored_tokens(
    tokenizer: Any, rows: TextRows, indices: np.ndarray | None, max_length: int, cache: Path | None
) -> tuple[Tokens, str | None]:
    """Tokens of these rows, made once a machine. Returns a warning too if the cache cannot be used.

    cache: None for drivetrain's own folder in the user's cache.
    """
    chosen = None if indices is None else blake2b(indices.astype(np.int64).tobytes(), digest_size=20).hexdigest()
    paired = "second" in rows.store
    key = content_key([rows.store.folder.name, chosen, max_length, paired, tokenizer.truncation_side], tokenizer, ())
    found, warning = stored(
        cache or default_root(), f"tokens-{key}", lambda folder: _build(folder, tokenizer, rows, indices, max_length)
    )
    segments = found.array("segments") if paired else None
    return Tokens(found.array("ids"), found.array("offsets"), segments, found.array("cut")), warning


def _build(folder: Path, tokenizer: Any, rows: TextRows, indices: np.ndarray | None, max_length: int) -> None:
    sizes = _sizes(rows, indices)
    blocks = _blocks(sizes)
    # of ordinary text a token is three bytes or more and takes four, in its block and in the array
    check_room(folder, min(int(sizes.sum()) * 3, len(sizes) * max_length * 8), f"tokenising {len(sizes):,} texts")
    work = Work(tokenizer, rows.store, indices, max_length, folder, blocks)
    left = [number for number in range(len(blocks)) if not _block_file(folder, number).exists()]
    shown = _Progress(sizes, blocks, left)
    for number in _tokenised(work, left, int(sizes.sum())):
        shown.finished(number)
    shown.end()
    _join(folder, len(blocks))


def _join(folder: Path, count: int) -> None:
    """The blocks' arrays, one after the other; the blocks go when the store is finished."""
    end = 0
    with Writer(folder) as writer:
        writer.append("offsets", np.zeros(1, np.int64))
        for number in range(count):
            with np.load(_block_file(folder, number), allow_pickle=False) as held:
                for name in held.files:
                    values = held[name]
                    if name == "lengths":
                        values, name = end + np.cumsum(values, dtype=np.int64), "offsets"
                        end = int(values[-1])
                    writer.append(name, values)
        writer.finish({})
    for number in range(count):
        _block_file(folder, number).unlink()


def _sizes(rows: TextRows, indices: np.ndarray | None) -> np.ndarray:
    """Bytes of each text, its pair included."""
    sizes = np.zeros(len(rows.store.array("rows")), np.int64)
    for name in ("first_ends", "second_ends"):
        if name in rows.store:
            sizes += np.diff(rows.store.array(name), prepend=0)
    return sizes if indices is None else sizes[indices]


def _blocks(sizes: np.ndarray) -> list[tuple[int, int]]:
    blocks, start = [], 0
    ends = np.cumsum(sizes)
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + BLOCK_TEXTS)
        blocks.append((start, stop))
        start = stop
    return blocks


def _block_file(folder: Path, number: int) -> Path:
    return folder / f"block-{number}.npz"


def _tokenise_block(work: Work, number: int) -> None:
    rows, (start, stop) = TextRows(work.rows), work.blocks[number]
    chosen = np.arange(start, stop) if work.indices is None else work.indices[start:stop]
    first, second = rows.first.taken(chosen), rows.second
    pairs = None if second is None else list(second.taken(chosen))
    made = tokenise_block(work.tokenizer, list(first), pairs, work.max_length)
    arrays = {"ids": made.ids, "lengths": made.lengths.astype(np.int32), "cut": made.cut}
    if made.segments is not None:
        arrays["segments"] = made.segments
    with replaced_when_whole(_block_file(work.folder, number)) as aside, aside.open("wb") as opened:
        np.savez(opened, allow_pickle=False, **arrays)


# --- processes -------------------------------------------------------------------------------------------------------


def _tokenised(work: Work, left: Sequence[int], size: int) -> Iterator[int]:
    """The numbers of blocks as they are finished."""
    processes = min(len(os.sched_getaffinity(0)), size // PROCESS_BYTES, len(left))
    if processes < 2 or not type(work.tokenizer).__module__.startswith("transformers."):  # else it may not travel
        for number in left:
            _tokenise_block(work, number)
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
        _tokenise_block(work, number)
        os.write(1, f"{number}\n".encode())  # ends this process once the builder is gone: nobody reads


# --- what a user sees ------------------------------------------------------------------------------------------------


class _Progress:
    """A line that says how far it is, for work that takes longer than two seconds."""

    def __init__(self, sizes: np.ndarray, blocks: Sequence[tuple[int, int]], left: Sequence[int]) -> None:
        starts = [start for start, _ in blocks]
        self._bytes = np.add.reduceat(sizes, starts) if len(starts) else np.zeros(0)
        self._all = int(self._bytes.sum())
        self._done = self._before = self._all - int(self._bytes[list(left)].sum())
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
