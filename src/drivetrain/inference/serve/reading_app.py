"""The application of a model that reads: its routes, within the same guards as those of a model that writes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import ASGIApp

from drivetrain import __version__
from drivetrain.inference.encoders import PictureClassifier
from drivetrain.inference.serve import reading
from drivetrain.inference.serve.app import ERRORS, Guards, add_errors, add_information, guarded
from drivetrain.inference.serve.reading import ServedReader
from drivetrain.web.event_stream import while_connected
from drivetrain.web.json_bodies import JsonRoute, written_json
from drivetrain.web.refusals import Refusal


def reading_application(served: ServedReader, guards: Guards) -> ASGIApp:
    """Returns the ASGI application: /v1/classify of a model with classes, /v1/embeddings of one of texts."""
    app = FastAPI(title="Drivetrain", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    app.router.route_class = JsonRoute
    add_errors(app)
    add_information(app, served.names, served.created, served.metrics)
    model = served.model
    if isinstance(model, PictureClassifier):

        @app.post("/v1/classify", response_model=None, responses={200: {"model": reading.Classifications}})
        async def classify_pictures(http: HttpRequest, body: reading.ClassifyRequest) -> Any:
            return await _answer(served, http, reading.classified_pictures(served, model, body))

        return guarded(app, served.metrics, guards)

    @app.post("/v1/embeddings", response_model=None, responses={200: {"model": reading.Embeddings}})
    async def embeddings(http: HttpRequest, body: reading.EmbeddingRequest) -> Any:
        return await _answer(served, http, reading.embeddings(served, model, body))

    if model.classes is not None:

        @app.post("/v1/classify", response_model=None, responses={200: {"model": reading.Classifications}})
        async def classify_texts(http: HttpRequest, body: reading.ClassifyRequest) -> Any:
            return await _answer(served, http, reading.classified_texts(served, model, body))

    return guarded(app, served.metrics, guards)


async def _answer(served: ServedReader, http: HttpRequest, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """Answers while the client stays, within the places and the time of the server."""
    try:
        with served.places.held(1):
            async with asyncio.timeout(served.seconds):
                found = await while_connected(http.receive, work)
                return Response(await asyncio.to_thread(written_json, found), media_type="application/json")
    except TimeoutError:
        raise Refusal(504, f"the answer was not complete after {served.seconds:g} s", "timeout") from None
    finally:
        work.close()
