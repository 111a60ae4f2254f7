"""Connections that end when their client is too slow: to send a request, or to read its answer.

uvicorn waits for both without end, so that a few hundred idle sockets would hold all places of a server, and a reader
that stopped would hold its answer's memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class GuardedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 with three deadlines, in seconds, after which a connection is cut."""

    HEADERS = 20.0  # from a connection's or a request's first byte to the end of its headers
    READING = 60.0  # a client that takes nothing of what is ready for it
    REST = 30.0  # the rest of a body whose request was answered already (refused)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start("headers", self.HEADERS)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and "headers" not in self._deadlines:
            self._start("headers", self.HEADERS)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end("headers")
        if self.conn.their_state is not h11.SEND_BODY:
            self._end("rest")

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._start("rest", self.REST)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("reading", self.READING)

    def resume_writing(self) -> None:
        self._end("reading")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._deadlines]:
            self._end(name)
        super().connection_lost(exc)

    def _start(self, name: str, seconds: float) -> None:
        self._end(name)
        self._deadlines[name] = self.loop.call_later(seconds, self._cut)

    def _end(self, name: str) -> None:
        if timer := self._deadlines.pop(name, None):
            timer.cancel()

    def _cut(self) -> None:
        self.transport.abort()  # close() would wait until the buffer is read
