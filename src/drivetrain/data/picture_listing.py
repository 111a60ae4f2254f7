"""Lists the image files below a folder once a machine, and finds the list again by the folders' times of change.

From 10,000 files on the list is arrays in the cache, which ranks, workers and later runs map: a million paths as Python
strings would take 150 MB in each of them. A file that is added, removed or renamed moves its folder's time of change,
so a start reads the folders alone, not the files. Times are trusted if they were older than two seconds when the files
were read: a change within the same tick of a file system's clock moves nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from drivetrain.data.array_store import Writer, replaced_when_whole, stored
from drivetrain.data.image_folders import FolderRead, read_folders
from drivetrain.data.lazy_texts import LazyTexts
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.errors import problem

FORMAT = 2
LEAST = 10_000  # files, from which on the list is kept
SETTLED = 2 * 10**9  # nanoseconds
Times = list[tuple[str, int]]  # folders, as their paths from the root, and when they changed
Found = tuple[str, Times]  # a digest of all files' names, and the folders' times


class Arrays(Protocol):
    """A finished store, or arrays in memory."""

    @property
    def facts(self) -> Any: ...

    def array(self, name: str) -> np.ndarray: ...


class Listing:
    """N image files below `root`, in order. top_of: (N,) numbers of the top folders that they lie below."""

    def __init__(self, root: Path, arrays: Arrays, key: str | None) -> None:
        """key: identifies the files' names and the folders' times; None if the list is not kept."""
        self.root, self.key, self._arrays = str(root), key, arrays
        self.top_of = arrays.array("top_of")

    @property
    def tops(self) -> list[str]:
        """The names of the top folders."""
        return list(self._arrays.facts["tops"])

    @property
    def others(self) -> list[tuple[str, int, str]]:
        """Files that are no images: their ending, how many, and the first of them."""
        return [
            (ending, count, os.path.join(self.root, first)) for ending, count, first in self._arrays.facts["others"]
        ]

    @property
    def repeated(self) -> list[tuple[str, str]]:
        """Links that are left out, and their targets."""
        return [(link, real) for link, real in self._arrays.facts["repeated"]]

    @cached_property
    def names(self) -> ListedFiles:
        """The paths from the root on."""
        return ListedFiles(self._arrays, None)

    @cached_property
    def files(self) -> ListedFiles:
        return ListedFiles(self._arrays, self.root)


class ListedFiles(LazyTexts):
    """Paths, made when they are used. root: their beginning."""

    def __init__(self, arrays: Arrays, root: str | None) -> None:
        self._root = root
        self._order, self._folder_of = arrays.array("order"), arrays.array("folder_of")
        self._names = MappedTexts(arrays.array("names"), arrays.array("name_ends"))
        self._folders = MappedTexts(arrays.array("folders"), arrays.array("folder_ends"))

    def __len__(self) -> int:
        return len(self._order)

    def text(self, index: int) -> str:
        place = int(self._order[index])
        folder, name = self._folders[int(self._folder_of[place])], self._names[place]
        below = name if folder == os.curdir else os.path.join(folder, name)
        return below if self._root is None else os.path.join(self._root, below)


def listed(
    root: Path, tops: Callable[[], Sequence[Path]], suffixes: frozenset[str], cache: Path, field: str
) -> tuple[Listing, str | None]:
    """Lists the image files below `tops()`: folders in `root`, or `root` itself. Returns a warning too if the cache
    cannot be used. Raises UserError if a folder changes while it is listed."""
    begun = time.time_ns()  # what changes from here on may be missed by what is read
    described = f"{FORMAT} {root.resolve()} {sorted(suffixes)} {tops.__qualname__}"
    known = cache / f"folders-{_digest(described)}.json"
    seen = _still_true(known, root)
    if seen is None:
        below = tops()
        few, seen = _looked(root, below, suffixes)
        if few is not None:
            held = _Held()
            held.facts = _write(held, root, below, few)
            return Listing(root, held, None), None

    def build(folder: Path) -> None:
        again = _Seen(root)
        with Writer(folder) as writer:
            facts = _write(writer, root, tops(), again.noted(read_folders(root, tops(), suffixes)))
            if again.found != seen:  # before the store is finished, which no later start would doubt
                raise problem(field, f"{root} changed while its files were listed", "start again when all are there")
            writer.finish(facts)

    key = _digest(f"{described} {seen}")
    store, warning = stored(cache, f"listing-{key}", build)
    if max(changed for _, changed in seen[1]) < begun - SETTLED and warning is None:
        with suppress(OSError), replaced_when_whole(known) as aside:
            aside.write_text(json.dumps(seen), encoding="utf-8")
    return Listing(root, store, key), warning


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


# --- the folders' times ----------------------------------------------------------------------------------------------


def _times_of(root: Path, folders: Iterable[str]) -> Times:
    return [(os.path.relpath(folder, root), os.stat(folder).st_mtime_ns) for folder in folders]


def _still_true(known: Path, root: Path) -> Found | None:
    """Returns an earlier start's list, if no folder has another time now."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        names, held = json.loads(known.read_text(encoding="utf-8"))
        times = [(str(folder), int(changed)) for folder, changed in held]
        if times and all(os.stat(os.path.join(root, folder)).st_mtime_ns == changed for folder, changed in times):
            return str(names), times
    return None


class _Seen:
    """The results of reading folders. Each folder's time is taken when it was read: a later change has a later one."""

    def __init__(self, root: Path) -> None:
        self._root, self._times, self._names = root, _times_of(root, [str(root)]), blake2b(digest_size=20)

    @property
    def found(self) -> Found:
        return self._names.hexdigest(), sorted(self._times)

    def noted(self, reads: Iterable[FolderRead]) -> Iterable[FolderRead]:
        """Yields the folders, and records each one."""
        for read in reads:
            if read.repeated is None:
                self._times += _times_of(self._root, [read.folder] if read.folder != str(self._root) else [])
            below = os.path.relpath(read.folder, self._root)
            names = "\0".join([str(read.top), below, *read.images, "", *read.others, ""])
            self._names.update(names.encode("utf-8", "surrogatepass"))
            yield read


def _looked(root: Path, tops: Sequence[Path], suffixes: frozenset[str]) -> tuple[list[FolderRead] | None, Found]:
    """Returns the counts of all folders and, if they hold fewer than LEAST files, what was read of them."""
    seen = _Seen(root)
    held: list[FolderRead] | None = []
    count = 0
    for read in seen.noted(read_folders(root, tops, suffixes)):
        count += len(read.images)
        if held is not None:
            held.append(read)
        if held is not None and count >= LEAST:
            held = None
            print(f"listing the pictures in {root}, which the next start need not", file=sys.stderr, flush=True)
    return held, seen.found


# --- arrays ----------------------------------------------------------------------------------------------------------


class _Held:
    """Arrays in memory, with the interface of a `Writer`."""

    def __init__(self) -> None:
        self.facts: Any = {}
        self._parts: dict[str, list[np.ndarray]] = {}
        self._ends: dict[str, int] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        self._parts.setdefault(name, []).append(values)

    def append_ends(self, name: str, lengths: Sequence[int] | np.ndarray) -> None:
        ends = self._ends.get(name, 0) + np.cumsum(lengths, dtype=np.int64)
        self.append(name, ends)
        self._ends[name] = int(ends[-1]) if len(ends) else self._ends.get(name, 0)

    def array(self, name: str) -> np.ndarray:
        return np.concatenate(self._parts[name])


def _write(into: Writer | _Held, root: Path, tops: Sequence[Path], reads: Iterable[FolderRead]) -> dict[str, Any]:
    """Appends the list's arrays folder by folder and returns its facts."""
    tops_of: list[np.ndarray] = [np.zeros(0, np.int32)]
    others: dict[tuple[int, str], tuple[int, str]] = {}
    repeated: list[tuple[int, str, str]] = []
    _append_texts(into, "names", "name_ends", [])  # so that all arrays are there
    _append_texts(into, "folders", "folder_ends", [])
    into.append("folder_of", np.zeros(0, np.int32))
    for number, read in enumerate(reads):
        below = os.path.relpath(read.folder, root)
        _append_texts(into, "folders", "folder_ends", [below])
        if read.repeated is not None:
            repeated.append((read.top, below, read.repeated))
        _append_texts(into, "names", "name_ends", read.images)
        into.append("folder_of", np.full(len(read.images), number, np.int32))
        tops_of.append(np.full(len(read.images), read.top, np.int32))
        for name in read.others:
            kind = (read.top, os.path.splitext(name)[1].lower() or "without ending")
            count, first = others.get(kind, (0, os.path.join(below, name)))
            others[kind] = (count + 1, first)
    top_of = np.concatenate(tops_of)
    order = np.argsort(top_of, kind="stable")
    into.append("order", order)
    into.append("top_of", top_of[order])
    by_top = sorted(repeated, key=lambda each: each[0])
    return {
        "tops": [top.name for top in tops],
        "others": _by_ending(others),
        "repeated": [(link, real) for _, link, real in by_top],
    }


def _by_ending(others: dict[tuple[int, str], tuple[int, str]]) -> list[tuple[str, int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for (_, ending), (count, first) in sorted(others.items(), key=lambda each: each[0][0]):
        before, earliest = found.get(ending, (0, first))
        found[ending] = (before + count, earliest)
    return [(ending, count, os.path.normpath(first)) for ending, (count, first) in found.items()]


def _append_texts(into: Writer | _Held, name: str, ends: str, texts: Sequence[str]) -> None:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    into.append(name, np.frombuffer(b"".join(encoded), np.uint8))
    into.append_ends(ends, [len(each) for each in encoded])
