"""Server-sent events, and work that ends when its client has gone.

A client that went away is noticed while the next event is awaited, by listening beside it; one that vanished without a
word (a cable, a proxy) by the comment that is sent when nothing else was for a while. One that reads too slowly is
closed by connections.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from drivetrain.web.bodies import ClientGone

T = TypeVar("T")
HEADERS = {"x-accel-buffering": "no"}  # nginx would hold events back
COMMENT = b": still here\n\n"


def event(data: str, name: str | None = None) -> bytes:
    """Returns an event. data: one line."""
    assert "\n" not in data, "a line of an event ends it"
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """A response that sends events as they come. events: closed when it ends or the client goes. closing: called
    then, whether it began or not. idle_seconds: of silence, after which a comment is sent."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], closing: Callable[[], None], idle_seconds: float = 15.0
    ) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._events, self._closing, self._idle = events, closing, idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's signature
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self._closing()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            following = asyncio.ensure_future(anext(self._events, None))
            try:
                while True:
                    done, _ = await asyncio.wait([following], timeout=self._idle)
                    body = following.result() if done else COMMENT
                    if body is None:
                        break
                    if done:
                        following = asyncio.ensure_future(anext(self._events, None))
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            finally:
                following.cancel()  # else the generator is busy, and cannot be closed
                await asyncio.wait([following])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`, or cancels it and raises ClientGone once the client has gone. receive: the
    request's, whose body was read."""
    gone = asyncio.ensure_future(_gone(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait([gone, working], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (gone, working):
            task.cancel()
        await asyncio.wait([gone, working])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
