"""Copies objects of a store into files: in ranges, several at once, so that a cut connection costs one range."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.runtime.atomic_file import replacing
from drivetrain.runtime.hub_store import HubStore
from drivetrain.runtime.object_store import PARALLEL, PART, Entry, ObjectStore, StoreError

Store = ObjectStore | HubStore
ATTEMPTS = 3  # of a whole object, where the server has no ranges


def download(store: Store, entry: Entry, file: Path, done: Callable[[int], None] = lambda _: None) -> None:
    """Writes an object into a file, whose place it takes when it is whole. done: called with the bytes of each part.

    Raises StoreError, also if the object changes meanwhile, and OSError for a disk that is full.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as aside:
        if isinstance(store, ObjectStore) and store.has_ranges:
            _ranges(store, entry, aside, done)
        else:
            _stream(store, entry, aside, done)


def _ranges(store: ObjectStore, entry: Entry, aside: Path, done: Callable[[int], None]) -> None:
    with _opened(aside, entry.bytes) as descriptor, ThreadPoolExecutor(PARALLEL, "download") as pool:

        def copy(start: int) -> None:
            part = store.read_range(entry.path, start, min(start + PART, entry.bytes), entry.tag)
            _write(descriptor, part, start)
            done(len(part))

        try:
            for _ in pool.map(copy, range(0, entry.bytes, PART)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _stream(store: Store, entry: Entry, aside: Path, done: Callable[[int], None]) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        place = 0
        try:
            with _opened(aside, entry.bytes) as descriptor:
                for part in store.stream(entry.path):
                    _write(descriptor, part, place)
                    place += len(part)
            if place != entry.bytes:
                raise StoreError(f"{store}/{entry.path}: {place:,} of {entry.bytes:,} bytes came")
        except StoreError as error:
            if attempt == ATTEMPTS or not error.passing:
                raise
            continue
        done(place)
        return


@contextmanager
def _opened(file: Path, size: int) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        if hasattr(os, "posix_fallocate") and size:
            with suppress(OSError):  # a full disk shows at the latest when it is written
                os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count
