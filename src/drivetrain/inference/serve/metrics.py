"""Counts and times of a server, in Prometheus' form."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drivetrain.web.limits import Places

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """A registry of its own, so that several servers of a process do not meet."""

    def __init__(self, places: Places) -> None:
        self._registry = CollectorRegistry()
        named: dict[str, Any] = {"namespace": "drivetrain", "registry": self._registry}
        self.requests = Counter("requests", "Requests by path and status.", ["path", "status"], **named)
        self.seconds = Histogram("request_seconds", "Time until the end.", ["path"], buckets=SECONDS, **named)
        self.first_piece = Histogram("first_token_seconds", "Time to the first token.", buckets=SECONDS, **named)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **named)
        self.new_tokens = Counter("new_tokens", "Tokens of answers.", **named)
        self.gone = Counter("clients_gone", "Answers whose client left before their end.", **named)
        making = Gauge("answers_in_the_making", "Answers in the making.", **named)
        making.set_function(lambda: places.taken)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Measured:
    """ASGI middleware: counts and times requests. paths: those that are named; all others are one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        status, start = 499, time.perf_counter()  # as nginx names a client that has gone

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - start)
            if status == 499:
                self._metrics.gone.inc()
