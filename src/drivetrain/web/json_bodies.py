"""Requests whose JSON names each key of an object once, and holds no numbers that JSON lacks.

Of two values Python's reader would take the last one without a word, and other readers, such as a proxy's that checks
requests, the first. It reads NaN and 1e999 too, which no answer in JSON could hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from drivetrain.errors import clipped
from drivetrain.web.refusals import Refusal


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
            self._json = json.loads(
                await self.body(), object_pairs_hook=_with_keys_once, parse_constant=_no_number, parse_float=_finite
            )
        return self._json


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise Refusal(400, f"the body has {clipped(text, 80)} where a finite number belongs", "invalid_request")


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Refusal(400, f"{clipped(repeated, 80)}: the body has this key twice in one object", "invalid_request")
    return found
