"""Shards that lie in a store: copied one after the other to this machine, ahead of their readers, and removed again.

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
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.data.rows import open_file
from drivetrain.data.shard_paths import expanded
from drivetrain.errors import RunError, problem
from drivetrain.runtime.object_store import Entry, StoreError
from drivetrain.runtime.store_cache import Source, bound_bytes, bucket_of, root, store_of

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

    def ready(self) -> None:
        """Returns once the copy is there. Raises RunError if it cannot be made."""
        self.copier.wait_for(self)

    def ahead(self) -> None:
        """Has the copy made while others are read."""
        self.copier.ask_for(self)


class Copier:
    """A process's connection to the process that makes its copies, which is started when it is first needed."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self._of, self._process = 0, None  # type: tuple[int, subprocess.Popen[str] | None]
        self._asked: dict[str, int] = {}  # file → how many answers are still to come
        self._failed: dict[str, str] = {}

    def ask_for(self, shard: ShardCopy) -> None:
        if shard.file.exists() or self._asked_here().get(str(shard.file)):
            return
        entry = shard.entry
        self._send({"path": entry.path, "bytes": entry.bytes, "tag": entry.tag, "file": str(shard.file)})

    def wait_for(self, shard: ShardCopy) -> None:
        name = str(shard.file)
        if not shard.file.exists():
            self.ask_for(shard)
        while self._asked_here().get(name):
            self._receive()
        if (why := self._failed.pop(name, None)) is not None:
            raise RunError(f"a shard of the stream cannot be copied: {why}; go on with --resume when the store answers")
        if shard.file.exists():
            os.utime(shard.file)  # read now: the last to be removed

    def _asked_here(self) -> dict[str, int]:
        if self._of != os.getpid():  # a forked process begins with its parent's connection, which is not its own
            self._of, self._process, self._asked, self._failed = os.getpid(), None, {}, {}
        return self._asked

    def _send(self, request: dict[str, Any]) -> None:
        process = self._process
        if process is None:
            command = [sys.executable, "-m", COPIER, self.bucket]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._process = process
            weakref.finalize(self, _end, process, os.getpid())
        assert process.stdin is not None
        self._asked[request["file"]] = 1
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
        self._asked.pop(answer["file"], None)
        if answer.get("why"):
            self._failed[answer["file"]] = answer["why"]

    def _lost(self) -> None:
        self._process, self._asked = None, {}
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
        if self.known is None:
            self._rows()
        assert self.known is not None
        return self.known

    def piece(self, start: int, stop: int) -> Any:
        from drivetrain.data.streams.shards import RowsShard

        if self.known is not None and start >= self.known:
            stop = start
        return RowsShard(self._rows(), self.name).piece(start, stop)

    def ahead(self) -> None:
        self.copy.ahead()

    def _rows(self) -> Any:
        self.copy.ready()
        rows = open_file(self.copy.file, self.name, self._field, stream=True)
        self.known = len(rows)
        return rows


def copies(address: str, field: str, endings: tuple[str, ...]) -> dict[str, ShardCopy]:
    """Returns name → copy of the objects of an address, in the order of their names; of a folder those with one of the
    endings. Raises UserError if there is none, or one is larger than the cache may be."""
    bucket = bucket_of(address)
    source = Source(address, expanded(address))
    try:
        found = source.entries(store_of(bucket))
    except StoreError as error:
        fix = "look at the address, the credentials in the environment and the network, and start again"
        raise problem(field, str(error), fix) from None
    whole = source.keys[0] if len(source.keys) == 1 else None
    kept = [each for each in found if each.path == whole or each.path.endswith(endings)]
    if not kept:
        why = f"there is nothing at {address} that ends in {', '.join(endings)}"
        raise problem(field, why, "correct the address")
    largest, bound = max(kept, key=lambda each: each.bytes), bound_bytes()
    if largest.bytes > bound:
        why = f"{largest.path} has {largest.bytes / 1e9:.2f} GB, and the cache of stores may hold {bound / 1e9:g} GB"
        raise problem(field, why, "set DRIVETRAIN_STORE_CACHE_GB to more, or make smaller shards")
    copier = Copier(bucket)
    fixed = (whole or "").rpartition("/")[0] if len(kept) == 1 else _common(kept)
    return {
        each.path.removeprefix(fixed).lstrip("/"): ShardCopy(copier, each, _place(bucket, each))
        for each in sorted(kept, key=lambda each: each.path)
    }


def _common(entries: list[Entry]) -> str:
    return os.path.commonpath([str(Path(each.path).parent) for each in entries]).removeprefix(".")


def _place(bucket: str, entry: Entry) -> Path:
    """Returns where a shard's copy lies. Another version of the shard lies elsewhere."""
    digest = hashlib.sha256(f"{bucket}/{entry.path} {entry.bytes} {entry.tag}".encode()).hexdigest()[:16]
    return streams_root() / f"{digest}-{Path(entry.path).name}"


def streams_root() -> Path:
    return root() / ".streams"
