"""Copies shards for a process that reads a stream: `python -m drivetrain.data.streams.shard_copier BUCKET THREADS`.

Reads one request a line, copies up to THREADS shards at once, answers with a line for each as it is done, and ends with
its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from drivetrain.errors import UserError, last_line
from drivetrain.runtime.downloads import Store, download
from drivetrain.runtime.object_store import Entry, StoreError
from drivetrain.runtime.store_cache import bound_bytes, store_of

SHARE = 256  # of the room that was found: until it is used up nothing is listed again, by any of so many readers


def main(bucket: str, threads: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which the whole group gets: they are for the process that reads
        signal.signal(number, signal.SIG_IGN)
    answering, copies = threading.Lock(), Copies(bucket)

    def answer(request: dict[str, Any]) -> None:
        try:
            why = copies.made(Entry(request["path"], request["bytes"], request["tag"], 0.0), Path(request["file"]))
            with answering:
                sys.stdout.write(json.dumps({"file": request["file"], "why": why}) + "\n")
                sys.stdout.flush()
        except BaseException:  # the reader waits for an answer, and would not hear of a thread that ended
            traceback.print_exc()
            os._exit(1)

    with ThreadPoolExecutor(threads, "copy") as pool:
        for line in sys.stdin:
            pool.submit(answer, json.loads(line))
        pool.shutdown(cancel_futures=True)


class Copies:
    """Makes copies of a bucket's shards, in several threads at once."""

    def __init__(self, bucket: str) -> None:
        self._bucket, self._lock, self._room = bucket, threading.Lock(), Room()
        self._store: Store | None = None

    def made(self, entry: Entry, file: Path) -> str:
        """Makes a copy, unless another process of the machine has made it. Returns why that failed, or ""."""
        try:
            with self._lock:
                store = self._store = self._store or store_of(self._bucket)
            file.parent.mkdir(parents=True, exist_ok=True)
            # by the first digit of its name: two processes do not copy the same shard, and seldom wait for each other
            with FileLock(file.parent / f"copying-{file.name[0]}.lock"):
                if not file.exists():
                    with self._room.taken(file.parent, entry.bytes):
                        download(store, entry, file)
        except (StoreError, UserError) as error:
            return str(error)
        except OSError as error:
            return f"{file}: {last_line(error)}"
        return ""


class Room:
    """The room for copies within the bound of the cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = self._used = 0  # when the copies were listed last, and since then
        self._coming = 0  # bytes of copies that are being made

    @contextmanager
    def taken(self, folder: Path, size: int) -> Iterator[None]:
        """Makes room for a copy that is made while the block runs."""
        with self._lock:
            self._coming += size
            self._used += size
            if self._used > self._free / SHARE:
                with FileLock(folder / "copying.lock"):
                    self._free, self._used = max(0, make_room(folder, self._coming)), 0
        try:
            yield
        finally:
            with self._lock:
                self._coming -= size


def make_room(folder: Path, wanted: int) -> int:
    """Removes the copies that were read longest ago, so that those that this process makes, of so many bytes together,
    fit within the bound. Returns what is left. A process that still has one open reads on in it."""
    own, files = f".partial-{os.getpid()}-", []
    for file in os.scandir(folder):
        with suppress(OSError):
            if not file.name.endswith(".lock") and own not in file.name:
                found = file.stat()
                files.append((found.st_mtime, found.st_size, file.path))
    left = int(bound_bytes()) - sum(size for _, size, _ in files) - wanted
    for _, size, path in sorted(files):
        if left >= 0:
            break
        Path(path).unlink(missing_ok=True)
        left += size
    return left


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
