"""Routes of the queue, and the stream of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from drivetrain.board.answers import Json, allowed
from drivetrain.board.board import Board, refuse_others
from drivetrain.board.bodies import Empty, Order, QueueSettings, Train
from drivetrain.board.entries import LOG
from drivetrain.board.records import Entry
from drivetrain.web.event_stream import EventStream
from drivetrain.web.refusals import Refusal

MOST_LOG = 1 << 20
TAIL = 1 << 16
Offset = Annotated[int | None, Query(ge=0, lt=1 << 60)]
Most = Annotated[int, Query(ge=1, le=MOST_LOG)]


def add(app: FastAPI, board: Board) -> None:
    _add_queue(app, board)
    _add_entries(app, board)

    @app.get("/api/events")
    async def events(request: Request, after: str | None = None) -> Response:
        """Streams the changes of all runs and of the queue, as server-sent events."""
        seen = request.headers.get("last-event-id") or after
        return EventStream(board.feed.events(seen), closing=lambda: None)


def _add_queue(app: FastAPI, board: Board) -> None:
    @app.get("/api/queue")
    def queue() -> Response:
        """Returns entries, settings and devices."""
        return Json(board.queue.shown())

    @app.post("/api/queue", status_code=201)
    def train(request: Request, body: Train) -> Response:
        """Queues a training. A key that was sent before gives the entry that it made then (200)."""
        entry, is_new = board.train(allowed(request), body.key, body.yaml, body.devices)
        return Json(entry.as_dict(), 201 if is_new else 200)

    @app.post("/api/queue/order")
    def order(request: Request, body: Order) -> Response:
        """Puts waiting entries into this order."""
        allowed(request, "administrator")
        board.queue.entries.reorder(body.ids)
        return Json(board.queue.shown())

    @app.post("/api/queue/settings")
    def settings(request: Request, body: QueueSettings) -> Response:
        """Changes settings of the queue."""
        allowed(request, "administrator")
        board.queue.change(**body.model_dump(exclude_none=True))
        return Json(board.queue.shown())


def _add_entries(app: FastAPI, board: Board) -> None:
    entries = board.queue.entries

    def entry_of(name: str) -> Entry:
        found = entries.one(name)
        if found is None:
            raise Refusal(404, "there is no such entry in the queue", "no_entry", "id")
        return found

    @app.post("/api/queue/{name}/cancel")
    def cancel(request: Request, name: str, body: Empty) -> Response:  # noqa: ARG001
        """Takes an entry that waits out of the queue."""
        user, entry = allowed(request), entry_of(name)
        refuse_others(user, entry.asked.owner)
        if entry.state != "queued" or not entries.cancel(entry, user.name):
            raise Refusal(409, f"the entry is {entry_of(name).state}, and waits no more", "not_waiting")
        return Json(entry_of(name).as_dict())

    @app.post("/api/queue/{name}/stop")
    def stop(request: Request, name: str, body: Empty) -> Response:  # noqa: ARG001
        """Ends an evaluation, predictions, an export or a chat that runs."""
        return Json(board.end(allowed(request), entry_of(name)).as_dict())

    @app.delete("/api/queue/{name}", status_code=204)
    def forget(request: Request, name: str) -> Response:
        """Forgets an entry that has ended, with its log."""
        user, entry = allowed(request), entry_of(name)
        refuse_others(user, entry.asked.owner)
        if entry.is_live:
            raise Refusal(409, f"the entry is {entry.state}", "busy")
        entries.forget(entry)
        return Response(status_code=204)

    @app.get("/api/queue/{name}/log")
    def log(name: str, after: Offset = None, most: Most = TAIL) -> Response:
        """Returns a part of what the process printed: the last, or what follows a place."""
        return Json(log_part(entries.folder / entry_of(name).id / LOG, after, most, not entry_of(name).is_live))


def log_part(file: Path, after: int | None, most: int, ended: bool) -> dict[str, Any]:
    """Returns text from byte `after` on; without it, the end of the log."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            start = max(0, size - most) if after is None else min(after, size)
            opened.seek(start)
            content = opened.read(most)
    except FileNotFoundError:
        return {"text": "", "next": 0, "size": 0, "ended": ended}
    whole = _whole(content) if start + len(content) < size or not ended else len(content)
    return {
        "text": content[:whole].decode("utf-8", "replace"),
        "next": start + whole,
        "size": size,
        "ended": ended and start + whole >= size,
    }


def _whole(content: bytes) -> int:
    """Returns the length without a character that is cut off at the end."""
    for back in range(1, min(4, len(content)) + 1):
        if content[-back] >= 0xC0:  # a character's first byte
            length = 2 if content[-back] < 0xE0 else 3 if content[-back] < 0xF0 else 4
            return len(content) - back if back < length else len(content)
        if content[-back] < 0x80:
            break
    return len(content)
