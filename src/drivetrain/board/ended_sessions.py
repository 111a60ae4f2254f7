"""Sessions that ended before their time, by a logout: kept in a file, so that a copy of a cookie does not come back to
life with the next start of the server."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

from pydantic import ConfigDict, ValidationError

from drivetrain.board.records import Record
from drivetrain.runtime.atomic_file import write_whole


class _Ended(Record):
    """times: SHA-256 of a cookie's value in hex → when the cookie would have ended by itself. No cookie is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    times: dict[str, float]


class EndedSessions:
    """file: None keeps them in memory alone."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._times: dict[str, float] = {}
        if file is not None and file.exists():
            self._times = dict(_read(file).times)

    def __contains__(self, cookie: object) -> bool:
        return isinstance(cookie, str) and _digest(cookie) in self._times

    def add(self, cookie: str, until: float) -> None:
        """Ends a session, and forgets those whose cookies have ended by themselves. Raises OSError where it cannot be
        written; in this process the session has ended all the same."""
        with self._lock:
            now = time.time()
            kept = {each: ends for each, ends in self._times.items() if ends > now}
            self._times = {**kept, _digest(cookie): until}
            if self._file is not None:
                write_whole(self._file, _Ended(times=self._times).model_dump_json())


def _read(file: Path) -> _Ended:
    """Returns what a file holds. One that was damaged holds nothing: the administrator can delete the board's secret,
    which ends all sessions."""
    try:
        return _Ended.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return _Ended(times={})


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).hexdigest()
