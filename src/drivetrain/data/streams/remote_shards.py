"""Shards that lie in a store: copied to this machine ahead of their readers, several at once, and removed again.

A stream reads its shards in an order that is known ahead, so each process has copies of a few of them made before it
reaches them. The copies of all streams together keep the bound of the cache of stores (runtime/store_cache.py): those
that were read longest ago go first, and one that is needed again is copied again. What is read, and in which order, is
the same as from a disk.

A process of its own makes the copies (shard_copier.py), since loader workers are forked, and obstore's threads do not
survive a fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from drivetrain.data.data_files import is_of_data, saved_files
from drivetrain.data.packed_files import OPENERS, ending
from drivetrain.data.row_blocks import ENDINGS
from drivetrain.data.rows import Rows, open_file
from drivetrain.data.shard_paths import names_of
from drivetrain.errors import RunError, UserError, problem
from drivetrain.runtime.downloads import Store
from drivetrain.runtime.object_store import Entry, StoreError
from drivetrain.runtime.store_cache import Source, bound_bytes, bucket_of, root, store_of

if TYPE_CHECKING:
    from drivetrain.data.streams.shards import RowsPiece

T = TypeVar("T")
AHEAD = 2  # shards that are copied before a reader reaches them, one after the other, where the cache is small
MOST_AHEAD = 8  # so many, and as many at once, where they take at most a quarter of it
ATTEMPTS = 20  # to read a copy that other readers have removed meanwhile
COPIER = "drivetrain.data.streams.shard_copier"


@dataclass(frozen=True)
class ShardCopy:
    """The copy of one shard, which may not be there yet. state: what changes when the shard does."""

    copier: Copier
    entry: Entry
    file: Path

    @property
    def size(self) -> int:
        return self.entry.bytes

    @property
    def state(self) -> str:
        return f"{self.copier.bucket}/{self.entry.path} {self.entry.bytes} {self.entry.tag}"

    def read(self, use: Callable[[Path], T]) -> T:
        """Returns what `use` makes of the copy, which is made first, and again if it was removed meanwhile. Raises
        RunError if it cannot be made."""
        for _ in range(ATTEMPTS):
            self.copier.wait_for(self)
            try:
                return use(self.file)
            except (OSError, UserError):
                if self.file.exists():
                    raise
        raise _too_small(self)

    def ahead(self, distance: int) -> None:
        """Has the copy made while others are read, if it is near enough. distance: shards that are read before it."""
        if distance <= self.copier.ahead:
            self.copier.ask_for(self)


class Copier:
    """A process's connection to the process that makes its copies, which is started when it is first needed."""

    def __init__(self, bucket: str, ahead: int = AHEAD) -> None:
        """ahead: shards that are copied before a reader reaches them."""
        self.bucket, self.ahead = bucket, ahead
        self._of, self._process = 0, None  # type: tuple[int, subprocess.Popen[str] | None]
        self._asked: set[str] = set()  # files whose answers are still to come
        self._failed: dict[str, str] = {}
        self._lock = threading.RLock()  # shards are counted by several threads
        self.held: tuple[Path, Rows] | None = None  # the rows that were opened last

    def __reduce__(self) -> tuple[type[Copier], tuple[str, int]]:
        return Copier, (self.bucket, self.ahead)  # a connection is of one process

    def begin_here(self) -> None:
        """Forgets the connection and the open rows of the process that this one was forked from."""
        if self._of != os.getpid():
            self._of, self._process, self._asked, self._failed = os.getpid(), None, set(), {}
            self._lock, self.held = threading.RLock(), None

    def ask_for(self, shard: ShardCopy) -> None:
        self.begin_here()
        with self._lock:
            if not shard.file.exists() and str(shard.file) not in self._asked:
                self._send(shard)

    def wait_for(self, shard: ShardCopy) -> None:
        """Returns once the copy is there. Other readers may remove it again."""
        self.begin_here()
        name = str(shard.file)
        with self._lock:
            is_earlier = name in self._asked  # asked for ahead, when the store may not have answered
            for _ in range(ATTEMPTS):
                with suppress(FileNotFoundError):
                    os.utime(shard.file)  # read now: the last to be removed
                    return
                self.ask_for(shard)
                while name in self._asked:
                    self._receive()
                why = self._failed.pop(name, None)
                if why is not None and not is_earlier:
                    then = "go on with --resume when the store answers"
                    raise RunError(f"a shard of the stream cannot be copied: {why}; {then}")
                is_earlier = False
        raise _too_small(shard)

    def _send(self, shard: ShardCopy) -> None:
        process, entry, name = self._process, shard.entry, str(shard.file)
        if process is None:
            # where the cache holds few shards, one at a time: several would push each other out
            threads = 1 if self.ahead == AHEAD else self.ahead
            command = [sys.executable, "-m", COPIER, self.bucket, str(threads)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._process = process
            weakref.finalize(self, _end, process, os.getpid())
        assert process.stdin is not None
        self._asked.add(name)
        self._failed.pop(name, None)
        request = {"path": entry.path, "bytes": entry.bytes, "tag": entry.tag, "file": name}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            self._lost()

    def _receive(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._lost()
        answer = json.loads(line)
        self._asked.discard(answer["file"])
        if answer.get("why"):
            self._failed[answer["file"]] = answer["why"]

    def _lost(self) -> None:
        self._process, self._asked = None, set()
        raise RunError("the process that copies shards of the stream has died; go on with --resume")


def _end(process: subprocess.Popen[str], of: int) -> None:
    if of != os.getpid():
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()


class RemoteRowsShard:
    """A shard of parquet, Arrow or another form whose rows are counted as it is opened."""

    def __init__(self, copy: ShardCopy, name: str, field: str) -> None:
        self.copy, self.name, self._field = copy, name, field
        self.known: int | None = None

    def count(self) -> int:
        return self.known if self.known is not None else self._read(len)

    def piece(self, start: int, stop: int) -> RowsPiece:
        from drivetrain.data.streams.shards import RowsPiece, RowsShard

        if self.known is not None and start >= self.known:
            return RowsPiece(lambda _: self.name, start)
        return self._read(lambda rows: RowsShard(rows, self.name).piece(start, stop))

    def ahead(self, distance: int) -> None:
        self.copy.ahead(distance)

    def _read(self, use: Callable[[Rows], T]) -> T:
        """Returns what `use` makes of the rows. Those of one shard stay open: CSV and JSON are parsed as a whole."""
        copier, file = self.copy.copier, self.copy.file
        copier.begin_here()

        def opened(file: Path) -> T:
            rows = open_file(file, self.name, self._field, stream=True)
            self.known, copier.held = len(rows), (file, rows)
            return use(rows)

        held = copier.held
        if held is not None and held[0] == file:
            with suppress(FileNotFoundError):
                os.utime(file)
            try:
                return use(held[1])
            except (OSError, UserError):  # parquet and Arrow are read as they are used
                if file.exists():
                    raise
        return self.copy.read(opened)


def copies(address: str, field: str) -> dict[str, ShardCopy]:
    """Returns name → copy of the objects of an address: those that a disk's readers would take, in their order.

    Raises UserError if there is none, one cannot be read, or the cache cannot hold those of one reader.
    """
    bucket = bucket_of(address)
    source = Source(address, names_of(address, field))
    try:
        store = store_of(bucket)
        found = _taken(source, source.entries(store, field), store, field)
    except StoreError as error:
        fix = "look at the address, the credentials in the environment and the network, and start again"
        raise problem(field, str(error), fix) from None
    if not found:
        known = f"{', '.join(ENDINGS)}, compressed also {', '.join(OPENERS)}"
        raise problem(field, f"there is nothing at {address} that ends in {known}", "correct the address")
    if empty := [each.path for each in found.values() if not each.bytes]:
        raise problem(field, f"{empty[0]} is empty", "give a file with rows")
    largest, bound = max(found.values(), key=lambda each: each.bytes), bound_bytes()
    num_held = min(len(found), 1 + AHEAD)
    if num_held * largest.bytes > round(bound):
        size = f"{largest.path} has {largest.bytes / 1e9:.2f} GB, of which a reader needs {num_held} at once"
        fix = "set DRIVETRAIN_STORE_CACHE_GB to more, for all readers of the machine, or make smaller shards"
        raise problem(field, f"{size}, and the cache of stores may hold {bound / 1e9:g} GB", fix)
    copier = Copier(bucket, max(AHEAD, min(MOST_AHEAD, int(bound / 4 // largest.bytes))))
    return {name: ShardCopy(copier, each, _place(bucket, each)) for name, each in found.items()}


def _taken(source: Source, found: list[Entry], store: Store, field: str) -> dict[str, Entry]:
    """Returns name → object as data/data_files.py has them of a disk: of a folder what can be read, of a pattern and of
    braces all that matches."""
    key = source.keys[0]
    if not source.is_pattern and [each.path for each in found] == [key]:
        return {PurePosixPath(key).name: found[0]}
    if not source.is_pattern:
        return _of_folder({each.path.removeprefix(key).lstrip("/"): each for each in found}, source, store, field)
    named = {each.path.removeprefix(source.folder).lstrip("/"): each for each in found}
    named = {name: each for name, each in sorted(named.items()) if not _is_hidden(name)}
    if unread := [name for name in named if ending(Path(name)) not in ENDINGS]:
        why = f"{source.address} matches {unread[0]}, which ends in none of {', '.join(ENDINGS)}"
        raise problem(field, why, "correct the pattern")
    return named


def _of_folder(below: dict[str, Entry], source: Source, store: Store, field: str) -> dict[str, Entry]:
    if "dataset_dict.json" in below:
        why = f"{source.address} holds several splits"
        raise problem(field, why, f"give the folder of one: {', '.join(sorted(_folders(below)))}")
    if "state.json" in below:  # a saved data set, beside whose files may lie what `map` cached
        state = below["state.json"].path
        text = b"".join(store.stream(state)).decode()
        names = saved_files(text, f"{store}/{state}", field)
        if missing := [name for name in names if name not in below]:
            raise problem(field, f"{store}/{state} names {missing[0]}, which is not there", "copy it there again")
        return {name: below[name] for name in names}
    named = sorted(below.items(), key=lambda item: PurePosixPath(item[0]).parts)
    return {name: each for name, each in named if is_of_data(PurePosixPath(name)) and ending(Path(name)) in ENDINGS}


def _folders(names: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in names if "/" in name}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _too_small(shard: ShardCopy) -> RunError:
    return RunError(
        f"the copy of {shard.entry.path} is removed again before it can be read: the cache of stores is too small for "
        "the readers of this machine; set DRIVETRAIN_STORE_CACHE_GB to more, and go on with --resume"
    )


def _place(bucket: str, entry: Entry) -> Path:
    """Returns where a shard's copy lies. Another version of the shard lies elsewhere."""
    digest = hashlib.sha256(f"{bucket}/{entry.path} {entry.bytes} {entry.tag}".encode()).hexdigest()[:16]
    return streams_root() / f"{digest}-{Path(entry.path).name}"


def streams_root() -> Path:
    return root() / ".streams"
