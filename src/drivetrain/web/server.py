"""Starts and stops a web server: the address that it binds, and an orderly end."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from drivetrain.errors import UserError, problem
from drivetrain.web.connections import GuardedConnection
from drivetrain.web.keys import Keys

MOST_CONNECTIONS = 900  # a process may have 1,024 files open on most systems


@dataclass(frozen=True)
class Address:
    """Where a server listens: a host and a port (0: a free one), or a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it."""
        if self.unix_socket is not None or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True  # a name


def check_address(address: Address, keys: Keys) -> None:
    """Raises UserError for an address that other machines reach, without a key."""
    if address.is_public and not keys:
        fix = "give --key-file FILE, or stay at 127.0.0.1 and reach it through ssh -L"
        raise problem("--host", f"other machines reach {address.host}, and there is no key", fix)


def bound(address: Address) -> socket.socket:
    """Returns a listening socket. Raises UserError where it cannot be had."""
    try:
        if address.unix_socket is not None:
            return _unix_socket(address.unix_socket)
        address.host.encode("idna")  # as bind does, which raises other errors for what is no name
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        found = socket.create_server((address.host, address.port), family=family, backlog=2048)
        # connections inherit it. asyncio sets it for sockets of its own alone: without it an answer's body waits until
        # its head is acknowledged, which clients do after 40 ms
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    except (OSError, UnicodeError) as error:
        failed = error if isinstance(error, OSError) else OSError(None, "it is no name of a machine")
        path = address.unix_socket
        raise _not_bound(address, failed) if path is None else _no_socket(path, failed) from None


def _not_bound(address: Address, error: OSError) -> UserError:
    """Returns why a host and a port cannot be had."""
    option, fix = "--host", "give an address of this machine, such as 127.0.0.1, or a name that has one"
    if error.errno == errno.EADDRINUSE:
        option, fix = "--port", "give another --port (0 takes a free one), or end the program that has it"
    elif error.errno == errno.EACCES:
        option, fix = "--port", "give a --port of 1024 or more (0 takes a free one)"
    return problem(option, f"cannot listen on {address.host}:{address.port}: {error.strerror or error}", fix)


def _no_socket(path: Path, error: OSError) -> UserError:
    """Returns why there can be no socket at a path."""
    why, fix = error.strerror or str(error), "give another file, in a folder in which you may make one"
    if error.errno in (None, errno.ENAMETOOLONG):
        why = f"its path has {len(os.fsencode(path))} bytes, too many for a socket"
        fix = "give a path of at most 100 bytes"
    elif error.errno == errno.ENOENT:
        why, fix = f"there is no folder {path.absolute().parent}", "make it, or give a file in another one"
    elif error.errno == errno.EADDRINUSE:
        is_socket = path.is_socket()
        why = "a program listens there already" if is_socket else "a file that is no socket is in the way"
        fix = f"{'end that program' if is_socket else 'remove it'}, or give another file"
    return problem("--unix-socket", f"cannot listen on {path}: {why}", fix)


def _unix_socket(path: Path) -> socket.socket:
    """Makes a socket that the own user alone may open. One that a server left behind is replaced."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) != 0:
                path.unlink()
    found = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        found.bind(str(path))
    except OSError:
        found.close()
        raise
    finally:
        os.umask(before)
    found.listen(2048)
    return found


def run(
    app: ASGIApp,
    listening: socket.socket,
    stop_seconds: int,
    ready: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serves until Ctrl-C or SIGTERM. Answers in the making then have `stop_seconds`; a second Ctrl-C cuts them short.

    ready: called once it accepts connections; stopping: once it is to end, before it waits for any answer.
    """
    server = Server(configured(app, stop_seconds), ready, stopping)
    with _signals_end_here():
        server.run(sockets=[listening])


def configured(app: ASGIApp, stop_seconds: int) -> uvicorn.Config:
    """Returns uvicorn's settings."""
    return uvicorn.Config(
        app,
        http=GuardedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # else its remarks on requests that are none reach the terminal
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client's address is its own, not what it writes into X-Forwarded-For
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=stop_seconds,
    )


class Server(uvicorn.Server):
    """uvicorn's server, with calls at its begin and its end."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._stopping = ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)


@contextmanager
def _signals_end_here() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more when it is done; they were meant for it alone."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
