"""Routes of the file picker, uploads, the data preview, the plan, and of evaluations, predictions and exports."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Query, Request
from fastapi.responses import FileResponse, Response

from drivetrain.board import bodies, jobs
from drivetrain.board.answers import Json, allowed
from drivetrain.board.board import Board, refuse_others
from drivetrain.board.chat import BASE, Chats
from drivetrain.board.files import added, listed
from drivetrain.board.files import allowed as allowed_path
from drivetrain.board.verbs import fixes, previewed
from drivetrain.web.event_stream import EventStream
from drivetrain.web.refusals import Refusal

PathText = Annotated[str, Query(min_length=1, max_length=4000)]
JSONL, CSV = "application/octet-stream", "text/csv; charset=utf-8"


def add(app: FastAPI, board: Board) -> None:
    _add_data(app, board)
    _add_jobs(app, board)
    _add_results(app, board)
    _add_chat(app, board)


def _add_data(app: FastAPI, board: Board) -> None:
    @app.get("/api/files")
    def files(request: Request, path: PathText | None = None) -> Response:
        """Returns what lies in a folder of the board's data."""
        allowed(request)
        return Json(listed(board.data_places, path))

    @app.post("/api/uploads", status_code=201)
    def upload(
        request: Request,
        content: Annotated[bytes, Body(media_type="application/octet-stream")],
        name: Annotated[str, Query(min_length=1, max_length=200)],
        beside: Annotated[str | None, Query(max_length=40)] = None,
        folder: PathText | None = None,
    ) -> Response:
        """Keeps a file to predict for; or, where a folder of data is given, puts it there."""
        if folder is not None:
            allowed(request)
            return Json(added(board.data_places, folder, name, content), 201)
        return Json(board.uploads.add(allowed(request).name, name, content, beside), 201)

    @app.post("/api/data/preview")
    def preview(request: Request, body: bodies.Preview) -> Response:
        """Returns samples as they are trained on, and what `drivetrain data` reports."""
        user = allowed(request)
        board.usable(user, body.yaml)
        found = board.verbs.data(user.name, body.yaml, body.rows, body.offset, body.set == "evaluation")
        return Json(previewed(found))

    @app.post("/api/plan")
    def plan(request: Request, body: bodies.Plan) -> Response:
        """Returns what `drivetrain plan` predicts, and what would make the run fit."""
        user = allowed(request)
        board.usable(user, body.yaml, body.axes)
        found = board.verbs.plan(user.name, body.yaml, body.axes, body.machine)
        return Json({**found, "fixes": fixes(found)})


def _add_jobs(app: FastAPI, board: Board) -> None:
    @app.get("/api/formats")
    def formats() -> Response:
        """Returns the formats of exports."""
        return Json({"formats": jobs.formats()})

    @app.post("/api/runs/{name}/evaluate", status_code=201)
    def evaluate(request: Request, name: str, body: bodies.Evaluate) -> Response:
        """Queues an evaluation of a checkpoint."""
        user = allowed(request)
        entry, is_new = jobs.evaluate(board, user, name, body.key, body.checkpoint, body.data, body.devices)
        return Json(entry.as_dict(), 201 if is_new else 200)

    @app.post("/api/runs/{name}/predict", status_code=201)
    def predict(request: Request, name: str, body: bodies.Predict) -> Response:
        """Queues predictions of a checkpoint: for an upload, a path, texts, or the run's evaluation data."""
        user = allowed(request)
        if sum(each is not None for each in (body.upload, body.path, body.rows)) > 1:
            raise Refusal(400, "give one of upload, path and rows", "invalid_request", "upload")
        source: str | list[str] | None = body.rows
        if body.upload is not None:
            source = str(board.uploads.place(user.name, body.upload))
        elif body.path is not None:
            source = str(allowed_path(board.data_places, body.path))
        entry, is_new = jobs.predict(board, user, name, body.key, body.checkpoint, source, body.devices)
        return Json(entry.as_dict(), 201 if is_new else 200)

    @app.post("/api/runs/{name}/export", status_code=201)
    def export(request: Request, name: str, body: bodies.Export) -> Response:
        """Queues an export of a checkpoint."""
        user = allowed(request)
        options = {"dtype": body.dtype, "quantise": body.quantise}
        entry, is_new = jobs.export(board, user, name, body.key, body.checkpoint, body.format, options, body.devices)
        return Json(entry.as_dict(), 201 if is_new else 200)


def _add_results(app: FastAPI, board: Board) -> None:
    entries = board.queue.entries

    @app.get("/api/queue/{name}")
    def entry(name: str) -> Response:
        """Returns an entry, and what it left."""
        found = entries.one(name)
        if found is None:
            raise Refusal(404, "there is no such entry in the queue", "no_entry", "id")
        return Json({**found.as_dict(), "result": jobs.result(board, found)})

    @app.get("/api/queue/{name}/predictions.{kind}")
    def predictions(name: str, kind: str) -> Response:
        """Returns predictions as a file: jsonl or csv."""
        found = entries.one(name)
        if found is None or kind not in ("jsonl", "csv"):
            raise Refusal(404, "there are no such predictions", "no_predictions")
        folder = entries.folder / found.id
        file = jobs.table_of(folder) if kind == "csv" else folder / jobs.PREDICTIONS
        if not file.is_file():
            raise Refusal(404, "the entry has no predictions", "no_predictions")
        shown = f"{found.asked.run}-predictions.{kind}"
        return FileResponse(file, media_type=CSV if kind == "csv" else JSONL, filename=shown)


def _add_chat(app: FastAPI, board: Board) -> None:
    chats = Chats(board)

    @app.post("/api/chat", status_code=201)
    def open_(request: Request, body: bodies.Chat) -> Response:
        """Queues a chat: its model is loaded by a process of its own."""
        entry, is_new = chats.open(
            allowed(request), body.model, body.key, body.checkpoint, body.devices, body.with_base
        )
        return Json({**entry.as_dict(), "ready": False, "waits": None}, 201 if is_new else 200)

    @app.get("/api/chat/{name}")
    def state(name: str) -> Response:
        """Returns the chat, whether its model answers, and what it waits for."""
        entry = chats.entry(name)
        return Json({**entry.as_dict(), "ready": chats.is_ready(entry), "waits": chats.waits(entry)})

    @app.post("/api/chat/{name}/reply")
    def reply(request: Request, name: str, body: bodies.Reply) -> Response:
        """Streams an answer, as server-sent events."""
        user, entry = allowed(request), chats.entry(name)
        refuse_others(user, entry.asked.owner)
        if entry.state != "running":
            raise Refusal(409, f"the chat is {entry.state}", "not_running")
        asked = {"messages": body.messages, "tools": body.tools, **body.sampling.model_dump()}
        given = {key: value for key, value in asked.items() if value is not None}
        if body.of_base:
            given["model"] = BASE
        return EventStream(chats.reply(entry, given), closing=lambda: None)

    @app.delete("/api/chat/{name}")
    def close(request: Request, name: str) -> Response:
        """Unloads the model."""
        user, entry = allowed(request), chats.entry(name)
        refuse_others(user, entry.asked.owner)
        chats.close(entry, user.name)
        return Json(chats.entry(name).as_dict())
