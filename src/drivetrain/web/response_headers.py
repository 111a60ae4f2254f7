"""Headers that every answer carries: no page may frame it, guess its type, load anything for it or keep it."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class ResponseHeaders:
    """ASGI middleware. policy: the Content-Security-Policy."""

    def __init__(self, app: ASGIApp, policy: str = "default-src 'none'; frame-ancestors 'none'") -> None:
        self._app = app
        self._headers = {**ALWAYS, "content-security-policy": policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sent)
