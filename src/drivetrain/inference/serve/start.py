"""Serves a loaded model until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.inference.encoders import Reader
from drivetrain.inference.loading import LoadedModel
from drivetrain.inference.serve.app import Guards, application
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.reading import ServedReader
from drivetrain.inference.serve.reading_app import reading_application
from drivetrain.inference.serve.served import Served
from drivetrain.web.keys import Keys
from drivetrain.web.limits import Places
from drivetrain.web.server import Address, run


@dataclass(frozen=True)
class Limits:
    """answers: in the making at once, those that wait among them; seconds: of one request; per_minute: requests of each
    caller; stop_seconds: for answers in the making once the server is stopped."""

    answers: int = 512
    seconds: float = 600.0
    per_minute: int | None = None
    stop_seconds: int = 30


def serve(
    model: LoadedModel | Reader,
    listening: socket.socket,
    address: Address,
    keys: Keys,
    names: Sequence[str],
    limits: Limits,
    ready: Callable[[], None],
) -> None:
    """Serves until Ctrl-C or SIGTERM, and closes the model. names: of the host, besides localhost."""
    places = Places(limits.answers)
    metrics = Metrics(places)
    guards = Guards(keys, [*names, address.host], address.is_public, limits.per_minute)
    served: Served | ServedReader
    if isinstance(model, LoadedModel):
        served = Served(model, places, metrics, limits.seconds)
        app = application(served, guards)
    else:
        served = ServedReader(model, places, metrics, limits.seconds)
        app = reading_application(served, guards)
    try:
        run(app, listening, limits.stop_seconds, ready)
    finally:
        served.close()
