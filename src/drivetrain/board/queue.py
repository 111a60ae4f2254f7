"""The queue: starts entries in their order, each on free devices, and never two on one place.

The scheduler is a thread that looks at the entries' files again and again. It holds no state of its own: a server that
was killed and started again finds the same entries in the same state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from drivetrain.board import keeper
from drivetrain.board.devices import Device, devices, environment, free, lane_of
from drivetrain.board.entries import LOG as ENTRY_LOG
from drivetrain.board.entries import Entries, tail
from drivetrain.board.records import Asked, Entry, Record
from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import write_whole

LOG = logging.getLogger(__name__)
SHOWN_ENDED = 50
TICK_SECONDS = 0.5
LOW_BYTES = 2 << 30  # of disk that is free


class Settings(Record):
    """at_once_cpu: entries that the CPU takes at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paused: bool = False
    paused_because: str | None = None
    go_on_after_failure: bool = True
    at_once_cpu: int = Field(default=1, ge=1, le=64)


class Queue:
    """folder: of the board."""

    def __init__(self, folder: Path) -> None:
        self.entries = Entries(folder / "entries")
        self._settings_file = folder / "queue.json"
        self._lock = threading.RLock()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._keepers: dict[int, str] = {}  # process number → id of its entry
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._watchers: list[Callable[[], None]] = []
        self._failed_before = {each.id for each in self.entries.all() if _is_failure(each)}

    def start(self) -> None:
        self._thread.start()

    def watch(self, look: Callable[[], None]) -> None:
        """Calls `look` at each look at the queue."""
        self._watchers.append(look)

    def close(self) -> None:
        """Starts nothing more. What runs goes on."""
        self._ended.set()
        self._wake.set()
        self._thread.join()

    @property
    def settings(self) -> Settings:
        try:
            return Settings.model_validate_json(self._settings_file.read_bytes())
        except (OSError, ValidationError):
            return Settings()

    def change(self, **changes: Any) -> None:
        """Changes settings. A queue that is let go on forgets why it was paused."""
        with self._lock:
            because = None if changes.get("paused") is False else self.settings.paused_because
            found = Settings(**{**self.settings.model_dump(), "paused_because": because, **changes})
            write_whole(self._settings_file, found.model_dump_json())
        self._wake.set()

    def add(self, asked: Asked, files: dict[str, str]) -> tuple[Entry, bool]:
        with self._lock:
            found = self.entries.add(asked, files)
        self._wake.set()
        return found

    def with_lock(self) -> threading.RLock:
        """The lock under which names of runs are given out."""
        return self._lock

    def shown(self) -> dict[str, Any]:
        """Returns the queue as the page shows it."""
        every = self.entries.all()
        waiting = [each for each in every if each.state == "queued"]
        working = [each for each in every if each.state in ("running", "stopping")]
        ended = sorted((each for each in every if not each.is_live), key=_end, reverse=True)[:SHOWN_ENDED]
        settings = self.settings
        return {
            "entries": [each.as_dict() for each in (*waiting, *working, *ended)],
            "settings": settings.model_dump(),
            "devices": [each.as_dict(every) for each in devices(settings.at_once_cpu)],
            "disk": self._disk(),
        }

    def _disk(self) -> dict[str, Any]:
        """Returns the room where runs are kept, and whether it is low: checkpoints may soon find none."""
        free = shutil.disk_usage(self.entries.folder).free
        return {"free_bytes": free, "is_low": free < LOW_BYTES}

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.tick()
                for look in self._watchers:
                    look()
            except Exception:  # a full disk must not end the queue for good
                LOG.exception("the queue could not be looked at; it goes on")
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()

    def tick(self) -> None:
        """Starts what can start now."""
        self._reap()
        with self._lock:
            every = self.entries.all()
            self._pause_after_failure(every)
            settings = self.settings
            waiting = [each for each in every if each.state == "queued" and each.launch is None]
            if settings.paused or not waiting:
                return
            known = devices(settings.at_once_cpu)
            full: set[tuple[str, str]] = set()  # where those behind wait: small runs would pass a large one for ever
            for entry in waiting:
                lane = lane_of(entry.asked)
                chosen = None if lane in full else free(entry, every, known)
                if chosen is None:
                    full |= {lane} if entry.asked.wanted is None else set()
                    continue
                self._launch(entry, chosen, known)
                every = self.entries.all()

    def _launch(self, entry: Entry, chosen: Sequence[str], known: Sequence[Device]) -> None:
        self.entries.launching(entry, chosen)
        folder = self.entries.folder / entry.id
        try:
            self._keepers[keeper.start(folder, chosen, environment(chosen, known))] = entry.id
        except (OSError, ValueError) as error:
            why = f"its keeper could not be started: {getattr(error, 'strerror', None) or error}"
            self.entries.fail(entry, why)

    def _reap(self) -> None:
        """Lets the system forget keepers that have ended. Entries that their keepers never took have failed."""
        for process, name in [*self._keepers.items()]:
            try:
                ended, status = os.waitpid(process, os.WNOHANG)
            except ChildProcessError:  # of an earlier server
                del self._keepers[process]
                continue
            if not ended:
                continue
            del self._keepers[process]
            code = os.waitstatus_to_exitcode(status)
            entry = self.entries.one(name)
            if code not in (0, keeper.TAKEN) and entry is not None and entry.state == "queued":
                printed = tail(self.entries.folder / name / ENTRY_LOG, 2000).strip()
                self.entries.fail(entry, f"its keeper ended with code {code} before it began\n{printed}".strip())

    def _pause_after_failure(self, every: Sequence[Entry]) -> None:
        failed = [each for each in every if _is_failure(each) and each.id not in self._failed_before]
        self._failed_before |= {each.id for each in failed}
        if failed and not self.settings.go_on_after_failure:
            self.change(paused=True, paused_because=f"{failed[-1].asked.run}: {failed[-1].state}")


def _is_failure(entry: Entry) -> bool:
    return entry.state in ("failed", "refused", "lost")


def _end(entry: Entry) -> str:
    return entry.ended.time if entry.ended else entry.claim.time if entry.claim else entry.asked.created


def digest_of(**asked: Any) -> str:
    """Returns what tells one request from another."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def unknown_devices(wanted: Sequence[str] | None) -> None:
    """Raises UserError for devices that are not here."""
    known = [each.name for each in devices(1)]
    unknown = [name for name in wanted or () if name not in known]
    if unknown or wanted == []:
        named = ", ".join(unknown) or "none"
        raise problem("devices", f"{named} was given; there are {', '.join(known)}", "choose among them")
