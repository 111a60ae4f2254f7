"""Values of a request as the client sent them: read off the raw scope, never off a URL that a framework put together
(CVE-2026-48710 and its kin: Host and path confusion)."""

from __future__ import annotations

from starlette.types import Scope


def headers_of(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of a header, one for each time that it was sent. name: in lower case."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def address_of(scope: Scope) -> str:
    """Returns the client's address; "local" over a Unix socket."""
    client = scope.get("client")
    return str(client[0]) if client else "local"
