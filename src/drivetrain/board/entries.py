"""The queue as files: a folder for each entry, which says all that is known of one process.

    entry.json   what was asked; written aside with the files of the entry and renamed into place, so that a folder is
                 complete or absent
    launch.json  the devices that the server is about to start it on
    claim.json   who took the entry: its keeper, once, or the user who cancelled it. Made by a hard link, so that the
                 first of any number wins and nothing is started twice
    stop.json    a wish to stop, which the keeper obeys
    ended.json   how the process ended, by its keeper
    log.txt      what the process printed
    output.txt   what a verb with a result printed as such: JSON
    texts.txt    texts that a user typed, one a line, which the process reads as its input

No database: a folder each can be read by `ls` and `cat`, survives a kill at any moment, and cannot be half-written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import ValidationError

from drivetrain.board.records import Asked, Claim, Ended, Entry, Launch, Record, State, Stop, now
from drivetrain.runtime.atomic_file import write_whole

ENTRY, LAUNCH, CLAIM, STOP, ENDED, LOG = (
    *("entry.json", "launch.json", "claim.json"),
    *("stop.json", "ended.json", "log.txt"),
)
RUN_FILE, OUTPUT = "run.yaml", "output.txt"
LAUNCH_SECONDS = 15.0  # in which a keeper that was started has claimed its entry
SAME_START = 2.0  # seconds by which a process's start may seem to differ from one reading to the next
NOT_STARTED = 126  # code of an entry whose process could not be started, as shells have it
ENDS: dict[int, State] = {0: "completed", 2: "refused", 130: "interrupted", 143: "interrupted"}
R = TypeVar("R", bound=Record)


class Entries:
    """The entries of a board. folder: theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._order = folder, folder.with_name("order.json")
        folder.mkdir(parents=True, exist_ok=True)
        self._ended: dict[str, Entry] = {}  # whose files change no more
        self._lock = threading.RLock()

    def add(self, asked: Asked, files: Mapping[str, str]) -> tuple[Entry, bool]:
        """Returns the entry, and whether it is new: one that is there stays."""
        aside = self.folder / f".{asked.id}-{os.getpid()}-{threading.get_ident()}"
        aside.mkdir()
        try:
            for name, text in {**files, ENTRY: asked.model_dump_json(indent=1)}.items():
                (aside / name).write_text(text, encoding="utf-8", newline="")
            aside.rename(self.folder / asked.id)
        except OSError:  # a folder that is not empty is never replaced: the request came before
            earlier = self.one(asked.id)
            if earlier is None:
                raise
            return earlier, False
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        found = self.one(asked.id)
        assert found is not None
        return found, True

    def all(self) -> list[Entry]:
        """Returns all entries: those that wait in their order, the others by the time of their request."""
        ids = [each.name for each in os.scandir(self.folder) if not each.name.startswith(".")]
        found = [entry for each in ids if (entry := self.one(each)) is not None]
        place = {each: number for number, each in enumerate(self.order())}
        return sorted(found, key=lambda each: (place.get(each.id, len(place)), each.asked.created, each.id))

    def one(self, name: str) -> Entry | None:
        if (found := self._ended.get(name)) is not None:
            return found
        if not name.isalnum():
            return None
        asked = _read(self.folder / name / ENTRY, Asked)
        if asked is None:
            return None
        entry = _state(self.folder / name, asked)
        if not entry.is_live:
            self._ended[name] = entry
        return entry

    def order(self) -> list[str]:
        found = _read(self._order, _Order)
        return [] if found is None else found.ids

    def reorder(self, ids: Sequence[str]) -> None:
        """Puts entries that wait into this order, before all others."""
        with self._lock:
            waiting = [each.id for each in self.all() if each.state == "queued"]
            known = [each for each in dict.fromkeys(ids) if each in waiting]
            rest = [each for each in waiting if each not in known]
            write_whole(self._order, _Order(ids=[*known, *rest]).model_dump_json())

    def launching(self, entry: Entry, devices: Sequence[str]) -> None:
        """Notes the devices, before a keeper is started."""
        self._write(entry, LAUNCH, Launch(devices=list(devices), time=time.time()))

    def cancel(self, entry: Entry, by: str) -> bool:
        """Returns whether the entry was still free to be cancelled."""
        return claimed(self.folder / entry.id, Claim(by=by, time=now()))

    def stop(self, entry: Entry, by: str, at_once: bool) -> None:
        self._write(entry, STOP, Stop(by=by, time=now(), now=at_once))

    def fail(self, entry: Entry, why: str) -> None:
        """Ends an entry that no keeper took and that cannot be started."""
        folder = self.folder / entry.id
        own = psutil.Process()
        claim = Claim(by="the board", time=now(), host=socket.gethostname(), process=own.pid, created=own.create_time())
        if claimed(folder, claim):
            write_whole(folder / ENDED, Ended(code=NOT_STARTED, time=now(), reason=why).model_dump_json())

    def forget(self, entry: Entry) -> None:
        self._ended.pop(entry.id, None)
        shutil.rmtree(self.folder / entry.id, ignore_errors=True)

    def _write(self, entry: Entry, name: str, record: Record) -> None:
        write_whole(self.folder / entry.id / name, record.model_dump_json())


class _Order(Record):
    ids: list[str]


def id_of(owner: str, key: str) -> str:
    """Returns the id of the entry that a user's key stands for."""
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()[:20]


def claimed(folder: Path, claim: Claim) -> bool:
    """Writes claim.json, whole, unless there is one. Returns whether it did."""
    aside = folder / f".claim-{os.getpid()}-{threading.get_ident()}"
    aside.write_text(claim.model_dump_json(), encoding="utf-8")
    try:
        os.link(aside, folder / CLAIM)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    return True


def read_stop(folder: Path) -> Stop | None:
    return _read(folder / STOP, Stop)


def _state(folder: Path, asked: Asked) -> Entry:
    claim, launch = _read(folder / CLAIM, Claim), _read(folder / LAUNCH, Launch)
    if claim is None:
        is_new = launch is not None and time.time() - launch.time < LAUNCH_SECONDS
        return Entry(asked=asked, state="queued", launch=launch if is_new else None)
    if claim.process is None:
        return Entry(asked=asked, state="cancelled", reason=f"cancelled by {claim.by}", claim=claim)
    stop = _read(folder / STOP, Stop)
    ended = _read(folder / ENDED, Ended)
    if ended is None and not is_alive(claim):
        ended = _read(folder / ENDED, Ended)  # written between the two looks
        if ended is None:
            why = "its process vanished without a word: it was killed, or the machine was restarted"
            return Entry(asked=asked, state="lost", reason=why, claim=claim)
    if ended is None:
        return Entry(asked=asked, state="running" if stop is None else "stopping", claim=claim)
    if ended.code == NOT_STARTED:
        return Entry(asked=asked, state="failed", reason=ended.reason, claim=claim, ended=ended)
    if stop is not None and (stop.now or ended.code == -signal.SIGTERM) and ended.code not in (0, 2):
        how = "ended at once" if stop.now else "ended"
        return Entry(asked=asked, state="interrupted", reason=f"{how} by {stop.by}", claim=claim, ended=ended)
    state = ENDS.get(ended.code, "failed")
    return Entry(asked=asked, state=state, reason=_reason(folder, ended, state), claim=claim, ended=ended)


def _reason(folder: Path, ended: Ended, state: State) -> str | None:
    """Returns why a process failed: the end of what it printed, or the signal that ended it."""
    if state in ("completed", "interrupted"):
        return None
    lines = tail(folder / LOG, 4096).strip().splitlines()
    printed = "\n".join(lines[-6:])
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}\n{printed}".strip()
    return printed or f"ended with code {ended.code}"


def tail(file: Path, most: int) -> str:
    """Returns the last `most` bytes of a text file; "" where there is none."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, 2) - most))
        return opened.read().decode("utf-8", "replace")
    return ""


def is_alive(claim: Claim) -> bool:
    """Returns whether the keeper of a claim lives; one of another machine is believed."""
    if claim.host != socket.gethostname():
        return True
    try:
        process = psutil.Process(claim.process)
        is_same = abs(process.create_time() - claim.created) < SAME_START
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _read(file: Path, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
