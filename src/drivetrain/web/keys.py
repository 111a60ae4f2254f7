"""Keys of an API: where they come from, and whether a request has one.

Keys are compared by their SHA-256, each with all of them, so that the time taken tells nothing about any.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.errors import Problem, UserError
from drivetrain.web.limits import CALLER, Buckets
from drivetrain.web.refusals import Refusal
from drivetrain.web.scopes import address_of, headers_of

VARIABLE = "DRIVETRAIN_API_KEY"
SHORTEST = 16  # characters: shorter ones are guessed
WRONG_A_MINUTE = 20  # wrong keys of an address, after which none is looked at for a while


class Keys:
    """The keys that a server takes; empty: it takes every request."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def number(self, given: str) -> int | None:
        """Returns which key it is, from 0; None for another text."""
        found = None
        digest = _digest(given)
        for place, own in enumerate(self._digests):
            if hmac.compare_digest(own, digest):
                found = place
        return found


def read_keys(file: Path | None) -> Keys:
    """Returns the keys of a file, one a line, and of the environment variable DRIVETRAIN_API_KEY.

    Raises UserError for keys that are too short, and for a file that others may read.
    """
    problems, keys = [], [key] if (key := os.environ.get(VARIABLE, "").strip()) else []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            readable = bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "is not UTF-8"
            raise UserError([Problem("--key-file", f"{file}: {why}", "give a file with a key a line")]) from None
        own = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        keys += own
        if not own:
            problems.append(Problem("--key-file", f"{file} holds no key", "write a key a line"))
        if readable:
            problems.append(Problem("--key-file", f"other users may read {file}", f"chmod 600 {file}"))
    if any(len(key) < SHORTEST for key in keys):
        why = f"a key has fewer than {SHORTEST} characters, which can be guessed"
        fix = "make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        problems.append(Problem(VARIABLE if file is None else "--key-file", why, fix))
    if problems:
        raise UserError(problems)
    return Keys(keys)


class KeyGuard:
    """ASGI middleware: asks for `Authorization: Bearer KEY`, except at `open_paths`. It writes into the scope who
    calls."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Sequence[str] = ()) -> None:
        self._app, self._keys, self._open = app, keys, frozenset(open_paths)
        self._wrong = Buckets(WRONG_A_MINUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http":
            scope[CALLER] = address_of(scope)
            if self._keys and scope["path"] not in self._open:
                refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        address = scope[CALLER]
        wait = self._wrong.wait(address)
        if wait:
            return _too_many(wait)
        given = headers_of(scope, b"authorization")
        if not given:
            why = "this server asks for a key: send the header Authorization: Bearer KEY"
            return Refusal(401, why, "missing_api_key", headers={"www-authenticate": "Bearer"})
        kind, _, key = given[0].partition(" ")
        number = self._keys.number(key.strip()) if kind.lower() == "bearer" and len(given) == 1 else None
        if number is None:
            self._wrong.take(address)
            return Refusal(401, "the key is wrong", "invalid_api_key", headers={"www-authenticate": "Bearer"})
        scope[CALLER] = f"key {number}"
        return None


def _too_many(wait: float) -> Refusal:
    headers = {"retry-after": str(int(wait) + 1)}
    return Refusal(429, "too many wrong keys from this address: wait a minute", "too_many_wrong_keys", headers=headers)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
