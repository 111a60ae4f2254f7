"""Refuses requests that another site's page makes in a user's browser.

A page anywhere can send requests to 127.0.0.1, and by DNS rebinding (its own name made to point here) it can read the
answers too. Three headers that a page cannot choose give it away: Host has its name, Origin its origin, Sec-Fetch-Site
that it is another site. Programs that are no browsers send Host alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.web.refusals import Refusal
from drivetrain.web.scopes import headers_of

HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
LOOPBACK_NAME = "localhost"
OWN_SITE = {"same-origin", "none"}


class BrowserGuard:
    """ASGI middleware. names: what the server may be called, besides localhost; addresses: whether any IP address is
    taken for one of the machine's own (no name points to it, so that none can be rebound), else loopback ones alone."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = (), addresses: bool = False) -> None:
        self._app, self._addresses = app, addresses
        self._names = {LOOPBACK_NAME, *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        hosts = headers_of(scope, b"host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            why = f"the header Host has {hosts[0]!r}" if hosts else "the header Host is missing"
            return Refusal(421, f"{why}, which is no name of this server (--host-name adds one)", "unknown_host")
        origins = headers_of(scope, b"origin")
        if any(not _same(origin, hosts[0]) for origin in origins):
            return Refusal(403, f"a page of {origins[0]} may not use this server", "foreign_origin", "Origin")
        if not OWN_SITE.issuperset(headers_of(scope, b"sec-fetch-site")):
            return Refusal(403, "a page of another site may not use this server", "foreign_site", "Sec-Fetch-Site")
        return None

    def _is_own(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().rstrip(".")
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._addresses or address.is_loopback


def _same(origin: str, host: str) -> bool:
    """Compares an origin with the Host of the request that carries it; a proxy may have ended TLS in between."""
    scheme, _, place = origin.partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme)
    return default is not None and place.lower().removesuffix(default) == host.lower().removesuffix(default)
