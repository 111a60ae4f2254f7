"""audit.jsonl: who changed what, a line for each request that is no look."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drivetrain.board.access import USER
from drivetrain.board.records import now
from drivetrain.web.scopes import address_of

LOG = logging.getLogger(__name__)
LOOKS = ("/api/parse", "/api/edit", "/api/check", "/api/check/full", "/api/command")  # posts that change nothing


class Audit:
    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Returns an application that writes down what was asked of `app`, and its answer's status."""

        async def audited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or scope["path"] in LOOKS:
                await app(scope, receive, send)
                return

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._write(scope, message["status"])
                await send(message)

            await app(scope, receive, noted)

        return audited

    def _write(self, scope: Scope, status: int) -> None:
        user = scope.get(USER)
        line = {
            "time": now(),
            "user": None if user is None else user.name,
            "address": address_of(scope),
            "asked": f"{scope['method']} {scope['path']}"[:500],
            "status": status,
        }
        try:
            with self._lock, self._file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(line) + "\n")
        except OSError:  # what was asked for is done, or refused: a full disk must not keep its answer back
            LOG.exception("%s could not be written: %s", self._file, line)
