"""Tells a web address that an entry has ended. The address is the administrator's, from the command line: no request
sets it, and no redirect is followed, so that no user makes the board ask anything of his choice."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import platform
import threading
import time
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from drivetrain.board.entries import Entries
from drivetrain.board.records import Entry
from drivetrain.errors import UserError, problem, shown

LOG = logging.getLogger(__name__)
MARK = "notified"  # a file in the entry's folder
SECONDS = 10.0
TRIES = 3
OLD = timedelta(hours=24)  # ended longer ago, before this board: no news


def check_address(address: str) -> None:
    """Raises UserError for what is no address of the web."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:  # a port above 65535 or of letters, a broken IPv6 address
        raise _no_address(address, str(error)) from None
    if parts.scheme not in ("http", "https"):
        raise _no_address(address, f"it begins with {parts.scheme or 'no scheme'}, not with http or https")
    if not parts.hostname or port == 0 or any(each.isspace() for each in address):
        what = "no host" if not parts.hostname else "port 0, at which nothing listens" if port == 0 else "a space"
        raise _no_address(address, f"it has {what}")
    if parts.username is not None:
        raise _no_address(address, "it has a user's name before its host, which is not sent")


def _no_address(address: str, why: str) -> UserError:
    return problem("--webhook", f"{shown(address)} is no address that can be asked: {why}", "give https://HOST/PATH")


class Notifier:
    """Sends a message for each entry that ends; for one that ended while no board was open, at the next start."""

    def __init__(self, entries: Entries, address: str) -> None:
        self._entries, self._address = entries, address
        self._seen: set[str] = set()
        self._due: SimpleQueue[Entry | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Looks for entries that have ended since."""
        for entry in self._entries.all():
            if entry.is_live or entry.id in self._seen:
                continue
            self._seen.add(entry.id)
            if _is_news(entry) and not (self._entries.folder / entry.id / MARK).exists():
                self._due.put(entry)

    def close(self) -> None:
        self._due.put(None)
        self._thread.join(SECONDS)

    def _send_all(self) -> None:
        while (entry := self._due.get()) is not None:
            for pause in range(TRIES):
                if self._sent(entry):
                    with contextlib.suppress(OSError):  # it was forgotten meanwhile
                        (self._entries.folder / entry.id / MARK).touch()
                    break
                time.sleep(pause)

    def _sent(self, entry: Entry) -> bool:
        """Returns whether the address took the message."""
        parts = urlsplit(self._address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=SECONDS)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"content-type": "application/json", "user-agent": "drivetrain-board"}
            connection.request("POST", path, json.dumps(message(entry)), headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            LOG.warning("the webhook does not answer: %s", type(error).__name__)
            return False
        finally:
            connection.close()
        if status >= 300:
            LOG.warning("the webhook answered with %s", status)
        return status < 300


def message(entry: Entry) -> dict[str, Any]:
    """Returns what is sent: `text` as chat programs show it, and the same in fields."""
    run, verb, state = entry.asked.run, entry.asked.verb, entry.state
    reason = (entry.reason or "").strip().splitlines()
    return {
        "text": f"{run}: {verb} {state}" + (f" ({reason[-1][:200]})" if reason else ""),
        "machine": platform.node(),
        "run": run,
        "verb": verb,
        "state": state,
        "owner": entry.asked.owner,
        "ended": None if entry.ended is None else entry.ended.time,
    }


def _is_news(entry: Entry) -> bool:
    """Returns whether the end of an entry is worth a message: not of a chat, and not of what a user took back."""
    if entry.asked.verb == "serve" or entry.state == "cancelled":
        return False
    ended = entry.ended.time if entry.ended else entry.claim.time if entry.claim else entry.asked.created
    return datetime.now(UTC) - datetime.fromisoformat(ended) < OLD
