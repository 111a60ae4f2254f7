"""index.json of a mirrored run: who writes there, and which checkpoints are complete.

It is one small object that changes by conditional puts alone: a put holds only if the object is still the version that
was read last. So a checkpoint is complete or absent, and of two writers one is refused at its next put, whatever it
believes. A writer renews its entry every RENEWED seconds; one that was not renewed for LEASE seconds, by the clock of
the process that waits, is dead, and its run may be taken over.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from drivetrain.errors import RunError, UserError, problem
from drivetrain.runtime.notices import Notify
from drivetrain.runtime.object_store import Conflict, NotThere, ObjectStore, StoreError, Version

NAME = "index.json"
RENEWED = 10.0
LEASE = 45.0
LOOKS = 1.0  # seconds between two looks at a writer that may be dead
PUTS = 3  # of one change, of which each may be done although its answer was lost


class Writer(BaseModel):
    model_config = ConfigDict(frozen=True)

    token: str
    host: str
    system: str  # boot and process namespace, in which the number of a process means something
    process: int
    since: str
    renewals: int = 0

    @property
    def title(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Complete(BaseModel):
    """A complete checkpoint. prefix: of its objects, below checkpoints/. facts: of its manifest."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    step: int
    prefix: str
    bytes: int
    facts: dict[str, Any]
    manifest: str  # SHA-256 of manifest.json


class Index(BaseModel):
    """earlier: tokens of writers that have ended, of whose checkpoints something may lie there that no index names: a
    killed upload, or a deletion that was killed."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    writer: Writer | None = None
    checkpoints: list[Complete] = []
    earlier: list[str] = []

    @property
    def newest(self) -> Complete | None:
        return max(self.checkpoints, key=lambda each: each.step, default=None)


class Lost(StoreError):
    """Another writer has taken the run over."""

    def __init__(self, message: str) -> None:
        super().__init__(message, passing=False)


def read(store: ObjectStore) -> tuple[Index | None, Version | None]:
    """Returns the index and its version; None where there is no run yet. Raises UserError for one that is damaged."""
    try:
        content, version = store.read(NAME)
        return Index.model_validate_json(content), version
    except NotThere as error:
        if "NoSuchBucket" in str(error):
            raise problem("mirror", str(error), "make the bucket, or correct the address") from None
        return None, None
    except ValidationError:
        why = f"{store}/{NAME} is no index of a run, or of a newer drivetrain"
        raise problem("mirror", why, "give another address") from None


class OwnIndex:
    """The index, held by this process as its only writer. Its methods may be called by several threads."""

    def __init__(self, store: ObjectStore, notify: Notify) -> None:
        self._store, self._notify, self._lock = store, notify, threading.Lock()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self.token = secrets.token_hex(4)
        self._writer = Writer(
            token=self.token, host=socket.gethostname(), system=_system(), process=os.getpid(), since=since
        )
        self.index, self._version = Index(), None  # type: tuple[Index, Version | None]
        self._lost: Lost | None = None
        self._ended = threading.Event()

    def claim(self) -> None:
        """Makes this process the run's writer. Raises UserError if another one is alive or is faster."""
        there, version = self._without_writer()
        there = there or Index()
        dead = [] if there.writer is None else [there.writer.token]
        index = there.model_copy(update={"writer": self._writer, "earlier": [*there.earlier, *dead]})
        try:
            self._version = self._store.put_if(NAME, _json(index), version)
        except Conflict:
            found, _ = read(self._store)
            raise self._taken(None if found is None else found.writer) from None
        self.index = index

    def keep(self) -> None:
        """Renews the entry in the background from now on, until this process releases, gives up or loses the run."""
        threading.Thread(target=self._keep_renewing, name="mirror-lease", daemon=True).start()

    def give_up(self) -> None:
        """Renews no longer: LEASE seconds later the run may be taken over."""
        self._ended.set()

    def check(self) -> None:
        """Raises Lost if another writer was found to have taken the run over."""
        if self._lost is not None:
            raise self._lost

    def change(self, change: Callable[[Index], Index]) -> Index:
        """Replaces the index. Raises Lost if another writer has replaced it."""
        with self._lock:
            return self._put(change(self.index))

    def renew(self) -> None:
        """Shows that this writer is alive; does nothing once it has released the run."""
        with self._lock:
            if self.index.writer is not None:
                renewed = self.index.writer.model_copy(update={"renewals": self.index.writer.renewals + 1})
                self._put(self.index.model_copy(update={"writer": renewed}))

    def release(self) -> None:
        ended = {"writer": None, "earlier": [*self.index.earlier, self.token]}
        self.change(lambda index: index.model_copy(update=ended))
        self._ended.set()

    def _keep_renewing(self) -> None:
        while not self._ended.wait(RENEWED):
            try:
                self.renew()
            except Lost:
                return
            except (RunError, UserError):  # of the store or a damaged index, which the uploads report
                continue

    def _put(self, index: Index) -> Index:
        for _ in range(PUTS):
            self.check()
            try:
                self._version = self._store.put_if(NAME, _json(index), self._version)
            except Conflict:
                found, version = read(self._store)
                writer = None if found is None else found.writer
                if writer is not None and writer.token == self.token:  # an own put, whose answer was lost
                    self._version = version
                    continue
                by = "another writer" if writer is None else writer.title
                self._lost = Lost(f"{self._store} was taken over by {by}: nothing more of this run is uploaded")
                raise self._lost from None
            self.index = index
            return index
        raise StoreError(f"{self._store}/{NAME} changes by itself, or by puts of this process that come late")

    def _without_writer(self) -> tuple[Index | None, Version | None]:
        """Returns the index once its writer is known to be dead. Raises UserError if that one is alive."""
        there, version = read(self._store)
        writer = None if there is None else there.writer
        if writer is None:
            return there, version
        if _ended_here(writer):
            return there, version
        self._notify(f"{self._store} has a writer ({writer.title}): looking for {LEASE:g} s whether it is alive")
        until = time.monotonic() + LEASE
        while time.monotonic() < until:
            time.sleep(LOOKS)
            there, now = read(self._store)
            if there is None or there.writer is None:
                return there, now
            if now != version:
                raise self._taken(there.writer)
        return there, version

    def _taken(self, writer: Writer | None) -> Exception:
        by = "another process" if writer is None else writer.title
        fix = "wait for it or end it (SIGTERM saves first), or give another mirror"
        return problem("mirror", f"a run is writing to {self._store}: {by}", fix)


def _ended_here(writer: Writer) -> bool:
    """Returns whether the writer was a process of this system that is gone, or is an earlier run of this process."""
    if not writer.system or writer.system != _system():
        return False
    if writer.process == os.getpid():
        return True
    try:
        os.kill(writer.process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _system() -> str:
    """Returns what names this boot of the machine and the namespace of its processes; empty where it has no names."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _json(index: Index) -> bytes:
    return index.model_dump_json(indent=1).encode()
