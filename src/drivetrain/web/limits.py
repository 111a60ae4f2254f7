"""How much may be asked: requests a minute of each caller, and answers that are in the making at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from drivetrain.web.refusals import Refusal
from drivetrain.web.scopes import address_of

CALLER = "drivetrain.caller"  # where a scope has who it is: the number of a key, or an address
MOST_CALLERS = 10_000  # that are remembered; the one that was seen longest ago is forgotten


class Buckets:
    """A token bucket for each caller: `per_minute` at once, refilled evenly over a minute."""

    def __init__(self, per_minute: float) -> None:
        self._most, self._rate = float(per_minute), per_minute / 60
        self._state: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller → tokens, when

    def wait(self, caller: str) -> float:
        """Returns the seconds until the caller has a token; 0 where it has one."""
        tokens = self._tokens(caller)
        return 0.0 if tokens >= 1 else (1 - tokens) / self._rate

    def take(self, caller: str) -> None:
        """Takes a token, or what is left of one."""
        self._state[caller] = max(0.0, self._tokens(caller) - 1), time.monotonic()
        self._state.move_to_end(caller)
        if len(self._state) > MOST_CALLERS:
            self._state.popitem(last=False)

    def _tokens(self, caller: str) -> float:
        tokens, then = self._state.get(caller, (self._most, 0.0))
        return min(self._most, tokens + (time.monotonic() - then) * self._rate)


class RateGuard:
    """ASGI middleware: `per_minute` requests of each caller; further ones get 429 and the seconds to wait."""

    def __init__(self, app: ASGIApp, per_minute: int) -> None:
        self._app, self._per_minute, self._buckets = app, per_minute, Buckets(per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        caller = scope.get(CALLER) or address_of(scope)
        wait = self._buckets.wait(caller)
        if not wait:
            self._buckets.take(caller)
            return None
        why = f"more than {self._per_minute} requests a minute: wait {wait:.1f} s"
        return Refusal(429, why, "rate_limit_exceeded", headers={"retry-after": str(int(wait) + 1)})


class Places:
    """The places of answers in the making. most: of all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    @contextmanager
    def held(self, count: int) -> Iterator[None]:
        """Holds places while answers are made. Raises Refusal (429) at once where too few are free."""
        if count > self.most:
            why = f"{count} answers are asked for at once, and this server makes {self.most}"
            raise Refusal(400, why, "too_many_answers")
        if self.taken + count > self.most:
            why = f"the server is busy: {self.taken} answers of at most {self.most} are in the making"
            raise Refusal(429, why, "queue_full", headers={"retry-after": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
