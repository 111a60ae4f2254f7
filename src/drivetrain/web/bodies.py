"""Limits of a request's body, before anything reads it: its bytes, the time that it takes to come, and for JSON its
depth, its number of lists and objects, and that it is text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drivetrain.web.refusals import Refusal
from drivetrain.web.scopes import headers_of

# strings are passed over as a whole, so that brackets in them do not count
STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
COMMAS = re.compile(rb'"(?:[^"\\]|\\.)*+"|,', re.DOTALL)
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # halves of surrogate pairs, in pairs or alone
DROPPED = 8  # times its limit, until which a body that is too large is read
LARGE = 1 << 18  # bytes from which JSON is looked through in a thread


@dataclass(frozen=True)
class BodyLimits:
    """bytes: of a body; seconds: until it is there; depth, containers, values: of JSON, where containers are its lists
    and objects, and values what they hold, all together."""

    bytes: int = 16 << 20
    seconds: float = 60.0
    depth: int = 64
    containers: int = 50_000
    values: int = 1_200_000


class ClientGone(Exception):
    """The client closed the connection."""


class BodyGuard:
    """ASGI middleware: reads the whole body, checks it and passes it on. most_bytes: of a request's body, where it
    depends on the request; left out, that of the limits."""

    def __init__(self, app: ASGIApp, limits: BodyLimits, most_bytes: Callable[[Scope], int] | None = None) -> None:
        self._app, self._limits = app, limits
        self._most_bytes = most_bytes or (lambda _: limits.bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._most_bytes(scope)
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await _read(receive, most)
        except TimeoutError:
            why = f"the body was not complete after {self._limits.seconds:g} s"
            raise Refusal(408, why, "slow_body", headers={"connection": "close"}) from None
        if body and any("json" in each.lower() for each in headers_of(scope, b"content-type")):
            if len(body) < LARGE:
                check_json(body, self._limits)
            else:
                await asyncio.to_thread(check_json, body, self._limits)
        return body


async def _read(receive: Receive, most: int) -> bytes:
    """Returns the body. One that is too large is read on for a while and dropped: clients send all before they read,
    and one whose connection is closed meanwhile never sees why."""
    parts, size, more = [], 0, True
    while more and size <= DROPPED * most:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        if size <= most:
            parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    if size > most:
        raise Refusal(413, f"the body has more than {most:,} bytes, which are the most", "body_too_large")
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body once, and then what the connection gives."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def check_json(body: bytes, limits: BodyLimits) -> None:
    """Raises Refusal (400) for JSON that is too deep or has too many parts, and for text that is not UTF-8 or has half
    a character. Broken JSON passes: its parser says where it breaks."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"the body is not UTF-8: byte {error.start + 1} of {len(body):,} ({error.reason})"
        raise Refusal(400, why, "invalid_utf8") from None
    depth = containers = 0
    for found in STRUCTURE.finditer(body):
        if found[0] in (b"[", b"{"):
            depth, containers = depth + 1, containers + 1
            if depth > limits.depth:
                raise Refusal(400, f"the JSON is nested more than {limits.depth} deep", "json_too_deep")
            if containers > limits.containers:
                why = f"the JSON has more than {limits.containers:,} lists and objects"
                raise Refusal(400, why, "json_too_large")
        elif found[0] in (b"]", b"}"):
            depth -= 1
    if body.count(b",") >= limits.values:  # in texts too; few bodies have as many, and only they are looked through
        _check_values(body, limits.values)
    if HALF.search(body):
        _check_halves(body)


def _check_values(body: bytes, most: int) -> None:
    commas = 0
    for found in COMMAS.finditer(body):
        commas += found[0] == b","
        if commas >= most:
            raise Refusal(400, f"the JSON has more than {most:,} values: send several requests", "json_too_large")


def _check_halves(body: bytes) -> None:
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        why = f"a text in the JSON has half a character ({half} without its other half)"
        raise Refusal(400, why, "invalid_utf8") from None
    except ValueError:  # broken in another way
        return
