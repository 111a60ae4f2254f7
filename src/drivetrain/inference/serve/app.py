"""The application: its routes, its guards, and its errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from drivetrain import __version__
from drivetrain.errors import clipped
from drivetrain.generation.requests import Answer, Request
from drivetrain.inference.serve import chat, completions, responses
from drivetrain.inference.serve.answering import Group
from drivetrain.inference.serve.metrics import Measured, Metrics
from drivetrain.inference.serve.served import Served, check_name
from drivetrain.web.bodies import BodyGuard, BodyLimits, ClientGone
from drivetrain.web.browser_guard import BrowserGuard
from drivetrain.web.event_stream import EventStream, event, while_connected
from drivetrain.web.json_bodies import JsonRoute, written_json
from drivetrain.web.keys import KeyGuard, Keys
from drivetrain.web.limits import RateGuard
from drivetrain.web.refusals import Refusal
from drivetrain.web.response_headers import ResponseHeaders

MOST_SHOWN = 10  # problems of a body that a message lists
HEALTH = "/health"
CLIENT_GONE = 499


@dataclass(frozen=True)
class Guards:
    """Who may ask, and how much. names: of the host, besides localhost; addresses: whether the server is reached by
    addresses of its machine other than loopback's."""

    keys: Keys
    names: Sequence[str] = ()
    addresses: bool = False
    per_minute: int | None = None
    bodies: BodyLimits = field(default_factory=BodyLimits)


class ErrorBody(BaseModel):
    """An error in the form of OpenAI's API."""

    class Error(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Error


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 421, 429, 500, 504)
}


def application(served: Served, guards: Guards) -> ASGIApp:
    """Returns the ASGI application."""
    app = FastAPI(title="Drivetrain", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    app.router.route_class = JsonRoute
    add_errors(app)
    add_information(app, served.names, served.created, served.metrics)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(http: HttpRequest, body: chat.ChatRequest) -> Any:
        route = _Route(
            lambda: chat.prepared(served, body),
            lambda asked: asked.requests,
            (lambda asked, group: chat.streamed(served, body, asked, group)) if body.stream else None,
            lambda asked, answers: chat.whole(served, body, asked, answers),
        )
        return await _answer(served, http, body.choices, route)

    @app.post("/v1/completions", response_model=None)
    async def text_completions(http: HttpRequest, body: completions.CompletionRequest) -> Any:
        route = _Route(
            lambda: completions.prepared(served, body),
            lambda requests: requests,
            (lambda requests, group: completions.streamed(served, body, requests, group)) if body.stream else None,
            lambda requests, answers: completions.whole(served, body, requests, answers),
        )
        return await _answer(served, http, body.answers, route)

    @app.post("/v1/responses", response_model=None)
    async def response(http: HttpRequest, body: responses.ResponsesRequest) -> Any:
        route = _Route(
            lambda: responses.prepared(served, body),
            lambda asked: asked.requests,
            (lambda asked, group: responses.streamed(served, body, asked, group)) if body.stream else None,
            lambda asked, answers: responses.whole(served, body, asked, answers),
        )
        return await _answer(served, http, 1, route)

    @app.get("/v1/responses/{number}", response_model=None)
    async def stored(number: str) -> Any:
        raise Refusal(404, f"there is no response {number}: none are stored here", "not_stored")

    return guarded(app, served.metrics, guards)


def guarded(app: FastAPI, metrics: Metrics, guards: Guards) -> ASGIApp:
    """Puts the guards around an application; a request meets them in the order below, from the last to the first."""
    paths = frozenset(app.openapi()["paths"])
    found: ASGIApp = BodyGuard(app, guards.bodies)
    if guards.per_minute is not None:
        found = RateGuard(found, guards.per_minute)
    found = KeyGuard(found, guards.keys, open_paths=[HEALTH])
    found = BrowserGuard(found, guards.names, guards.addresses)
    return Measured(ResponseHeaders(found), metrics, paths)


@dataclass(frozen=True)
class _Route:
    """How a request of one path becomes requests of the generator, and their answers a response. prepare: reads and
    tokenises it, and may take long; stream: None where the response is sent whole."""

    prepare: Callable[[], Any]
    requests_of: Callable[[Any], Sequence[Request]]
    stream: Callable[[Any, Group], AsyncGenerator[bytes, None]] | None
    whole: Callable[[Any, list[Answer]], Any]


async def _answer(served: Served, http: HttpRequest, count: int, route: _Route) -> Any:
    """Answers while the client stays, within the places and the time of the server, which begin before any work on the
    request. count: its answers."""
    with ExitStack() as held:
        held.enter_context(served.places.held(count))
        asked, group = await while_connected(http.receive, served.begun(route.prepare, route.requests_of))
        held.callback(group.close)
        served.metrics.prompt_tokens.inc(sum(len(request.ids) for request in route.requests_of(asked)))
        if route.stream is not None:
            return EventStream(_with_errors(route.stream(asked, group)), closing=held.pop_all().close)
        answers = await while_connected(http.receive, group.whole())
        body = await served.finished(lambda: written_json(route.whole(asked, answers)))
        return Response(body, media_type="application/json")


async def _with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Ends a stream whose answer failed with an event that has the reason: its status was sent long ago."""
    try:
        async with aclosing(events):
            async for each in events:
                yield each
    except Refusal as refusal:
        yield event(json.dumps(refusal.body))


def add_information(app: FastAPI, names: Sequence[str], created: int, metrics: Metrics) -> None:
    """Adds the routes that describe the server."""

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "drivetrain"}

    @app.get("/v1/models", response_model=None)
    async def models() -> Any:
        return {"object": "list", "data": [described(name) for name in names]}

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Any:
        check_name(model, names)
        return described(model)

    @app.get(HEALTH, response_model=None)
    async def health() -> Any:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> Any:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_errors(app: FastAPI) -> None:
    """Puts every error into the form of OpenAI's API."""

    @app.exception_handler(Refusal)
    async def refused(_: HttpRequest, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(ClientGone)
    async def gone(_: HttpRequest, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        return _of_the_body(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: HttpRequest, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI's own, for JSON that Python's reader gives up
            return Refusal(400, "the body cannot be read as JSON", "invalid_request").response()
        served = ", ".join(path for path in app.openapi()["paths"] if "{" not in path)
        why = {
            404: f"there is no {request.url.path} here; there are {served}",
            405: f"{request.method} is not for {request.url.path}",
        }
        message = why.get(error.status_code, str(error.detail))
        return Refusal(error.status_code, message, "http_error", headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(_: HttpRequest, __: Exception) -> Response:
        return Refusal(500, "the server failed; its log has the reason", "internal_error").response()


def _of_the_body(error: RequestValidationError) -> Refusal:
    """Returns all that is wrong with a body, field by field, up to MOST_SHOWN of them."""
    found = {}
    for each in error.errors():
        if each["type"] == "json_invalid":
            why = f"the body is no JSON: {each['ctx']['error']} at character {each['loc'][-1]}"
            return Refusal(400, why, "invalid_request")
        if each["type"] == "model_attributes_type" and len(each["loc"]) == 1:  # curl -d alone sends a form
            why = "the body is no JSON object: send one, with the header content-type: application/json"
            return Refusal(400, why, "invalid_request")
        place = ".".join(str(part) for part in each["loc"][1:]) or "body"
        found[clipped(place, 80)] = str(each["msg"]).removeprefix("Value error, ")
    lines = [f"{place}: {why}" for place, why in found.items()]
    more = f" (and {len(lines) - MOST_SHOWN} more)" if len(lines) > MOST_SHOWN else ""
    return Refusal(400, "; ".join(lines[:MOST_SHOWN]) + more, "invalid_request", next(iter(found)))
