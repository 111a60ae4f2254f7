"""Clients that are slow, silent or gone: their connections end, and nothing of theirs is held."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import pytest
from starlette.types import Receive, Scope, Send

from drivetrain.web.connections import GuardedConnection
from drivetrain.web.event_stream import EventStream, event
from tests.running_server import Running, running


class Events:
    """An application whose events are made by a function; it counts the streams that are open."""

    def __init__(self, size: int, seconds: float, count: int = 1_000_000) -> None:
        self.size, self.seconds, self.count, self.open, self.closed = size, seconds, count, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        self.open += 1
        await EventStream(self._events(), self._close, idle_seconds=0.1)(scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        for number in range(self.count):
            yield event(f"{number} " + "x" * self.size)
            await asyncio.sleep(self.seconds)

    def _close(self) -> None:
        self.closed += 1

    def settled(self) -> None:
        end = time.monotonic() + 10
        while self.closed < self.open:
            assert time.monotonic() < end, f"{self.open - self.closed} streams are open"
            time.sleep(0.01)


@pytest.fixture
def quick_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADERS", "READING", "REST"):
        monkeypatch.setattr(GuardedConnection, name, 0.4)


def connected(server: Running, request: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    found.sendall(request)
    return found


def ends(connection: socket.socket, seconds: float = 5) -> bool:
    """Returns whether the server ends the connection."""
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


def drip(connection: socket.socket, data: bytes) -> None:
    for _ in range(100):
        connection.sendall(data)
        time.sleep(0.02)


@pytest.fixture
def slow_server(quick_deadlines: None) -> Iterator[Running]:  # noqa: ARG001  set before the server starts
    with running(Events(10, 0.01)) as found:
        yield found


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_client_that_does_not_end_its_headers_is_cut(slow_server: Running, begun: bytes) -> None:
    with connected(slow_server, begun) as connection:
        assert ends(connection)


def test_headers_that_drip_are_cut_too(slow_server: Running) -> None:
    with connected(slow_server, b"GET / HTTP/1.1\r\n") as connection, pytest.raises(ConnectionError):
        drip(connection, b"X: 1\r\n")


def test_a_second_request_on_a_connection_has_its_own_deadline(slow_server: Running) -> None:
    with connected(slow_server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HT")
        start = time.monotonic()
        assert ends(connection)
        assert time.monotonic() - start < 3


def test_a_refused_body_that_goes_on_is_cut(slow_server: Running) -> None:
    request = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with connected(slow_server, request) as connection, pytest.raises(ConnectionError):
        drip(connection, b"x" * 100)


@pytest.mark.usefixtures("quick_deadlines")
def test_a_reader_that_stopped_is_cut_and_its_stream_closed() -> None:
    app = Events(100_000, 0)
    with running(app) as server:
        with connected(server):
            app_closed = time.monotonic() + 10
            while not app.closed:
                assert time.monotonic() < app_closed
                time.sleep(0.01)
        assert (app.open, app.closed) == (1, 1)


@pytest.mark.usefixtures("quick_deadlines")
def test_a_slow_reader_that_goes_on_reading_gets_all() -> None:
    app = Events(200_000, 0, count=20)
    with running(app) as server, connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        size = 0
        while size < 20 * 200_000:
            size += len(connection.recv(1 << 16))
            time.sleep(0.005)
        app.settled()


def test_a_client_that_resets_or_goes_is_noticed_between_events() -> None:
    app = Events(10, 60)
    with running(app) as server:
        plain, hard = connected(server), connected(server)
        for connection in (plain, hard):
            assert b"0 xxx" in connection.recv(1000) + connection.recv(1000)
        hard.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        plain.close()
        hard.close()
        app.settled()


def test_a_silent_stream_shows_that_it_lives() -> None:
    with running(Events(10, 60)) as server, connected(server) as connection:
        found = b""
        while found.count(b": still here") < 2:
            found += connection.recv(1000)
        assert found.count(b"data: ") == 1


def test_many_clients_that_come_and_go_leave_nothing() -> None:
    app = Events(100, 0.002)

    def visit(number: int) -> None:
        with connected(server) as connection:
            for _ in range(number % 5):
                connection.recv(1000)

    with running(app) as server:
        threads = [threading.Thread(target=visit, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        app.settled()
        assert app.open == 100
