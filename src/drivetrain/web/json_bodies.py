"""Requests whose JSON names each key of an object once, and holds no numbers that JSON lacks.

Of two values Python's reader would take the last one without a word, and other readers, such as a proxy's that checks
requests, the first. It reads NaN and 1e999 too, which no answer in JSON could hold.

Large bodies and responses are read and written beside the event loop. Python's reader lets other threads go on only
where an object ends, so what one body may hold is bounded (`bodies.BodyLimits`); the writer here does at every value.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from drivetrain.errors import clipped
from drivetrain.web.bodies import LARGE
from drivetrain.web.refusals import Refusal

MOST_KEYS = 10_000  # of one object


class JsonRoute(APIRoute):
    """A route that refuses such bodies; make it an application's `router.route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(_JsonRequest(request.scope, request.receive))
            except HTTPException as error:  # into which FastAPI turns what a body's reading raises
                if isinstance(error.__cause__, Refusal):
                    raise error.__cause__ from None
                raise

        return handler


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = read_json(body) if len(body) < LARGE else await asyncio.to_thread(read_json, body)
        return self._json


def read_json(body: bytes) -> Any:
    """Returns the value. Raises Refusal (400) for a key that stands twice, too many of them, and numbers that JSON has
    not; ValueError for what is no JSON."""
    return json.loads(body, object_pairs_hook=_with_keys_once, parse_constant=_no_number, parse_float=_finite)


def written_json(content: Any) -> bytes:
    """Returns the JSON of a large value, for a thread beside the event loop: `json.dumps` would let no other thread go
    on before it is done."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(encoder.iterencode(content)).encode()


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise Refusal(400, f"the body has {clipped(text, 80)} where a finite number belongs", "invalid_request")


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise Refusal(
            400, f"an object of the body has {len(pairs):,} keys, and the most are {MOST_KEYS:,}", "json_too_large"
        )
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Refusal(400, f"{clipped(repeated, 80)}: the body has this key twice in one object", "invalid_request")
    return found
