"""Arrays on disk, written once and then mapped, which ranks, workers and later runs of one machine share.

A store is a folder of raw arrays with a contents.json, which is written last: a folder without one is unfinished. The
first process that needs a store builds it under a lock, the others wait for it outside of any collective, so that hours
of work run into no process group's timeout. Parts that a killed builder finished lie in its folder for the next.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from drivetrain.data.cache_entries import CONTENTS, keep_below_bound
from drivetrain.data.mapped import mapped
from drivetrain.errors import problem
from drivetrain.memory.garbage import rarer
from drivetrain.runtime import scratch
from drivetrain.runtime.user_cache import user_cache

SAMPLED, SAMPLE_BYTES = 64, 1 << 16  # a file up to their product is read whole
FIELD = "workload.data.cache"


class Store:
    """A finished store. facts: JSON-able, as the builder passed them."""

    def __init__(self, folder: Path, contents: Mapping[str, Any]) -> None:
        self.folder, self.facts = folder, contents["facts"]
        self._dtypes: Mapping[str, str] = contents["dtypes"]

    def __contains__(self, name: str) -> bool:
        return name in self._dtypes

    def array(self, name: str) -> np.ndarray:
        """Maps an array from its file, read-only: its pages are in memory once a machine, and only while there is
        room."""
        return mapped(self.folder / name, np.dtype(self._dtypes[name]))


class Writer:
    """Appends to the arrays of a store that is being built."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._ends: dict[str, int] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._dtypes[name] = values.dtype.str
            self._files[name] = (self._folder / name).open("wb")
        assert values.dtype.str == self._dtypes[name]
        self._files[name].write(values.tobytes())

    def append_ends(self, name: str, lengths: Sequence[int] | np.ndarray) -> None:
        """Appends the ends of parts that lie one after the other, (N,) int64."""
        ends = self._ends.get(name, 0) + np.cumsum(lengths, dtype=np.int64)
        self.append(name, ends)
        self._ends[name] = int(ends[-1]) if len(ends) else self._ends.get(name, 0)

    def finish(self, facts: Mapping[str, Any]) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        samples = {name: sampled_digest(self._folder / name) for name in self._files}
        aside = self._folder / f"{CONTENTS}.partial"
        aside.write_text(json.dumps({"facts": facts, "dtypes": self._dtypes, "samples": samples}), encoding="utf-8")
        aside.replace(self._folder / CONTENTS)


def stored(root: Path, key: str, build: Callable[[Path], None]) -> tuple[Store, str | None]:
    """Returns the store of that key, which is built if it is missing or damaged, and a warning if the cache cannot be
    used.

    build: fills a folder by a `Writer`, and may find there the finished parts of a killed call. Raises UserError if the
    disk has no room for it.
    """
    place = root / key
    found, damage = _opened(place)
    if found is not None:
        return found, None
    lock = _lock(root, key)
    if isinstance(lock, OSError):
        temporary = scratch.make()  # of a process that ends without its exit handlers, the next launch removes it
        atexit.register(temporary.close)
        place = temporary.path
        damage = f"tokens could not be cached in {root} ({lock.strerror}); they are made again next time"
        return _built(place, build), damage
    try:
        found, damage = _opened(place)
        if found is None:
            if damage:
                shutil.rmtree(place)
            found = _built(place, build)
            keep_below_bound(root)
        return found, damage
    finally:
        lock.release()


def sampled_digest(file: Path) -> str:
    """Returns a digest of a file's size and of blocks spread evenly over it, its beginning and end among them."""
    size = file.stat().st_size
    digest = blake2b(size.to_bytes(8, "little"), digest_size=20)
    last = max(0, size - SAMPLE_BYTES)
    whole = size <= SAMPLED * SAMPLE_BYTES
    with file.open("rb") as opened:
        if whole:
            digest.update(opened.read())
        for number in range(0 if whole else SAMPLED):
            opened.seek(last * number // (SAMPLED - 1))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def default_root() -> Path:
    return user_cache() / "drivetrain" / "tokenised"


def check_room(folder: Path, wanted: int, what: str) -> None:
    """Raises UserError for a full disk before hours of work. wanted: bytes."""
    free = shutil.disk_usage(folder).free
    if wanted > free:
        why = f"{what} takes about {wanted / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB free"
        raise problem(FIELD, why, "make room, or give a folder on another disk")


@contextmanager
def replaced_when_whole(file: Path) -> Iterator[Path]:
    aside = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        yield aside
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def _lock(root: Path, key: str) -> FileLock | OSError:
    """Holds a lock, which the kernel releases when its process ends in any way."""
    lock = FileLock(root / f"{key}.lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=1)
        except Timeout:
            print(f"another process prepares the same data in {root}; waiting for it", file=sys.stderr, flush=True)
            lock.acquire(poll_interval=0.2)
    except (OSError, NotImplementedError) as error:
        return error if isinstance(error, OSError) else OSError(0, "no file can be locked there")
    return lock


def _built(place: Path, build: Callable[[Path], None]) -> Store:
    try:
        place.mkdir(parents=True, exist_ok=True)
        with rarer():
            build(place)
    except OSError as error:
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(place):
            raise
        fix = "make room, or give a folder on another disk"
        raise problem(FIELD, f"{place} cannot be written: {error.strerror or error}", fix) from error
    found, damage = _opened(place)
    assert found is not None, damage
    return found


def _opened(place: Path) -> tuple[Store | None, str | None]:
    """Returns (store, None), or (None, None) if it is not finished, or (None, what is wrong with it)."""
    try:
        contents = json.loads((place / CONTENTS).read_text(encoding="utf-8"))
        for name, digest in contents["samples"].items():
            if sampled_digest(place / name) != digest:
                raise ValueError(f"{name} is not what was written")
        store = Store(place, contents)
    except FileNotFoundError as error:
        if str(error.filename) == str(place / CONTENTS):
            return None, None
        return None, f"the token cache {place} was damaged ({Path(error.filename).name} is gone) and is made again"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"the token cache {place} was damaged ({type(error).__name__}) and is made again"
    with suppress(OSError):
        os.utime(place / CONTENTS)  # when it was used last
    return store, None
