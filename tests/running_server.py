"""A server on a thread of the test's process, and the few bytes of HTTP that no client library would send."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from drivetrain.inference.serve.app import Guards, application
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.served import Served
from drivetrain.web.keys import Keys
from drivetrain.web.limits import Places
from drivetrain.web.server import Address, bound, configured
from tests.scripted_model import ScriptedModel, scripted


@dataclass
class Running:
    """A server that listens."""

    port: int
    stop: Callable[[], None]
    served: Served | None = None
    model: ScriptedModel = field(default_factory=scripted)
    clients: list[Any] = field(default_factory=list)
    seconds: float = 20  # to wait for an answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **given: Any) -> Any:
        from openai import OpenAI

        self.clients.append(OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": 30, **given}))
        return self.clients[-1]

    def raw(self, data: bytes, seconds: float | None = None) -> bytes:
        """Sends bytes, and returns all that comes until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds or self.seconds) as connection:
            connection.sendall(data)
            found = b""
            while part := connection.recv(1 << 16):
                found += part
            return found

    def ask(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Returns status, headers and JSON of an answer. body: bytes are sent as they are. headers: with _ for -."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json", "content-length": str(len(content))}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"host": f"127.0.0.1:{self.port}", "connection": "close", **kind, **given}
        lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in named.items()]
        answer = self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        head, _, rest = answer.partition(b"\r\n\r\n")
        status, *pairs = head.decode().split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (pair.partition(":") for pair in pairs)}
        return int(status.split()[1]), found, json.loads(rest) if "json" in found.get("content-type", "") else rest

    def settled(self, seconds: float = 10) -> None:
        """Waits until no answer is in the making, in the server and in the generator."""
        assert self.served is not None
        end = time.monotonic() + seconds
        while self.served.places.taken or self.model.generator.running:
            assert time.monotonic() < end, f"{self.served.places.taken} places, {self.model.generator.running} requests"
            time.sleep(0.01)


@contextmanager
def running(app: ASGIApp, stop_seconds: int = 1) -> Iterator[Running]:
    """Serves any application."""
    listening = bound(Address(port=0))
    port = listening.getsockname()[1]

    def stop() -> None:
        server.should_exit = True

    server = uvicorn.Server(configured(app, stop_seconds))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        found = Running(port, stop)
        yield found
    finally:
        stop()
        thread.join()
        listening.close()
    for client in found.clients:
        client.close()


@contextmanager
def serving(
    model: ScriptedModel | None = None, most: int = 64, seconds: float = 60, keys: tuple[str, ...] = (), **guards: Any
) -> Iterator[Running]:
    """Serves a scripted model."""
    model = model or scripted()
    places = Places(most)
    served = Served(model, places, Metrics(places), seconds)  # type: ignore[arg-type]
    with running(application(served, Guards(Keys(keys), **guards))) as found:
        found.served, found.model = served, model
        yield found
    served.close()
