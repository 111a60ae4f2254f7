"""Who asks: a token in the Authorization header, or the cookie that a token was exchanged for.

A cookie is the user's name, the time of its end and an HMAC over both and the token: it survives a restart of the
server, and ends with the token. It is HttpOnly and SameSite=Strict, and named by the port, since cookies of one host
are shared by all of its ports.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.board.ended_sessions import EndedSessions
from drivetrain.errors import Problem, UserError, problem
from drivetrain.web.keys import SHORTEST, WRONG_A_MINUTE
from drivetrain.web.limits import CALLER, Buckets
from drivetrain.web.refusals import Refusal
from drivetrain.web.scopes import address_of, headers_of

Role = Literal["viewer", "operator", "administrator"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "administrator")  # each may do what those before it may
ADMIN = "admin"  # the name of who holds the board's own token
SECONDS = 30 * 24 * 3600  # of a cookie
USER = "drivetrain.user"  # where a scope has it


@dataclass(frozen=True)
class User:
    name: str
    role: Role

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "role": self.role}


class Access:
    """The users of a board. users: by the SHA-256 of their tokens in hex. secret: signs cookies. ended: the file of
    sessions that were ended by a logout."""

    def __init__(self, users: Mapping[str, User], secret: bytes, cookie: str, ended: Path | None = None) -> None:
        self._users, self._secret, self.cookie = dict(users), secret, cookie
        self._ended = EndedSessions(ended)
        self._wrong = Buckets(WRONG_A_MINUTE)

    def of_token(self, token: str, address: str) -> User:
        """Raises Refusal for a wrong token, and for any after too many wrong ones from an address."""
        wait = self._wrong.wait(address)
        if wait:
            why = "too many wrong tokens from this address: wait a minute"
            raise Refusal(429, why, "too_many_wrong_tokens", headers={"retry-after": str(int(wait) + 1)})
        own, found = digest(token), None
        for each, user in self._users.items():
            if hmac.compare_digest(each, own):
                found = user
        if found is None:
            self._wrong.take(address)
            raise Refusal(401, "the token is wrong", "wrong_token", "token")
        return found

    def cookie_of(self, user: User) -> str:
        ends = str(int(time.time()) + SECONDS)
        name = base64.urlsafe_b64encode(user.name.encode()).decode().rstrip("=")
        nonce = secrets.token_urlsafe(9)
        return f"{name}.{ends}.{nonce}.{self._signature(user, ends, nonce)}"

    def of_cookie(self, value: str) -> User | None:
        parts = value.split(".")
        if len(parts) != 4 or value in self._ended:
            return None
        name, ends, nonce, signature = parts
        if not ends.isdecimal() or len(ends) > 12 or int(ends) < time.time():
            return None
        for user in self._users.values():
            own = base64.urlsafe_b64encode(user.name.encode()).decode().rstrip("=")
            signed = self._signature(user, ends, nonce)
            if own == name and hmac.compare_digest(signed.encode(), signature.encode()):
                return user
        return None

    def end(self, value: str) -> None:
        """Ends the session of a cookie before its time, also for later starts of the server; other texts are none."""
        if self.of_cookie(value) is not None:
            self._ended.add(value, time.time() + SECONDS)

    def _signature(self, user: User, ends: str, nonce: str) -> str:
        token = next(each for each, other in self._users.items() if other == user)
        text = f"{user.name}\0{user.role}\0{ends}\0{nonce}\0{token}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def read_users(file: Path | None) -> dict[str, User]:
    """Returns the users of a file, a line `NAME ROLE TOKEN` each, by the digest of their tokens.

    Raises UserError with every line that is wrong, and for a file that others may read.
    """
    if file is None:
        return {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        is_open = bool(file.stat().st_mode & 0o077)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        raise problem("--users", f"{file}: {why}", "give a file with a user a line: NAME ROLE TOKEN") from None
    problems = [Problem("--users", f"other users may read {file}", f"chmod 600 {file}")] if is_open else []
    found: dict[str, User] = {}
    names = {ADMIN}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        why = _why_no_user(words, names, found)
        if why:
            fix = "write NAME ROLE TOKEN, the role one of viewer, operator, administrator"
            problems.append(Problem("--users", f"line {number}: {why}", fix))
            continue
        name, role, token = words
        names.add(name)
        found[digest(token)] = User(name, next(each for each in ROLES if each == role))
    if problems:
        raise UserError(problems)
    return found


def _why_no_user(words: Sequence[str], names: Collection[str], found: Mapping[str, User]) -> str | None:
    if len(words) != 3:
        return f"has {len(words)} words, not 3"
    name, role, token = words
    if role not in ROLES:
        return f"there is no role {role}"
    if name in names:
        return f"the name {name} is taken"
    if len(token) < SHORTEST:
        return f"the token has fewer than {SHORTEST} characters, which can be guessed"
    return "the token is another user's" if digest(token) in found else None


class LoginGuard:
    """ASGI middleware: lets in who has a token or its cookie, and writes into the scope who it is.

    open_paths: those of the login; a page without a cookie is sent there, by a relative address, since a proxy may have
    put the board below a path of its own.
    """

    def __init__(self, app: ASGIApp, access: Access, open_paths: Sequence[str]) -> None:
        self._app, self._access, self._open = app, access, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither web sockets nor anything else is served
        scope[CALLER] = address_of(scope)
        try:
            user = self._user(scope)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        if user is not None:
            scope[USER], scope[CALLER] = user, f"user {user.name}"
        elif scope["path"] not in self._open:
            await self._turned_away(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _user(self, scope: Scope) -> User | None:
        given = headers_of(scope, b"authorization")
        if given:
            kind, _, token = given[0].partition(" ")
            if kind.lower() != "bearer" or len(given) > 1:
                raise Refusal(401, "send the header Authorization: Bearer TOKEN", "wrong_token")
            return self._access.of_token(token.strip(), address_of(scope))
        for value in cookies_of(scope, self._access.cookie):
            if (user := self._access.of_cookie(value)) is not None:
                return user
        return None

    async def _turned_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            await send({"type": "http.response.start", "status": 303, "headers": [(b"location", b"login")]})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = {"www-authenticate": "Bearer"}
        refusal = Refusal(401, "log in first: this board asks for a token", "not_logged_in", headers=headers)
        await refusal.response()(scope, receive, send)


def cookies_of(scope: Scope, name: str) -> list[str]:
    """Returns the values of a cookie, one for each header that has it."""
    found = []
    for header in headers_of(scope, b"cookie"):
        try:
            read = SimpleCookie(header)
        except CookieError:
            continue
        if name in read:
            found.append(read[name].value)
    return found


def digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def kept_secret(file: Path) -> str:
    """Returns the secret in a file that its owner alone may read. It is made where there is none."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = file.read_text(encoding="ascii").strip()
        if len(found) >= SHORTEST and not file.stat().st_mode & 0o077:
            return found
        file.unlink()  # cut off, or readable for others: no secret any more
        return kept_secret(file)
    made = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(made)
    return made
