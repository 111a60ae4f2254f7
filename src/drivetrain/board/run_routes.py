"""Routes of runs: history, one run, its curve, log and files, and what may be done with it."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response

from drivetrain.board import bodies
from drivetrain.board.answers import Json, allowed
from drivetrain.board.board import Board, refuse_others
from drivetrain.board.entries import LOG
from drivetrain.board.queue_routes import TAIL, Most, Offset, log_part
from drivetrain.board.run_details import WHAT_HAPPENS, details, file_in
from drivetrain.board.run_record import as_download, record_of, training_of
from drivetrain.board.run_summary import Beside
from drivetrain.board.runs import files_of, matching
from drivetrain.errors import counted
from drivetrain.run_page.answers import newest_answers
from drivetrain.run_page.page import as_html
from drivetrain.tracking.quantities import size_text
from drivetrain.web.refusals import Refusal

Words = Annotated[str, Query(max_length=200)]
Points = Annotated[int, Query(ge=2, le=200_000)]


def add(app: FastAPI, board: Board) -> None:
    _add_history(app, board)
    _add_files(app, board)
    _add_actions(app, board)
    _add_deletion(app, board)


def _add_history(app: FastAPI, board: Board) -> None:
    runs = board.runs

    @app.get("/api/runs")
    def history(
        search: Words = "",
        tag: Words | None = None,
        status: Words | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
    ) -> Response:
        """Returns runs, the newest first."""
        every = runs.all()
        found = list(matching(every, search, tag, status))
        tags = sorted({tag for each in every for tag in each["tags"]})
        return Json({"runs": found[offset : offset + limit], "total": len(found), "tags": tags})

    @app.get("/api/runs/{name}")
    def one(name: str) -> Response:
        """Returns all that is known of a run."""
        return Json(details(runs, board.curves, name))

    @app.get("/api/runs/{name}/curve")
    def curve(name: str, after: Words | None = None, most: Points = 2000) -> Response:
        """Returns the points of the curve, or those that came after an earlier answer's cursor."""
        runs.one(name)
        return Json(board.curves.since(runs.folder(name), after, most))


def _add_files(app: FastAPI, board: Board) -> None:
    runs = board.runs

    @app.get("/api/runs/{name}/report")
    def report(name: str) -> Response:
        """Returns the run as a page of a single file, as a download."""
        page = as_html(record_of(runs, board.queue.entries, name))
        return Response(page, media_type="text/html", headers=as_download(f"{name}.html"))

    @app.get("/api/runs/{name}/samples")
    def samples(name: str, last: Annotated[int, Query(ge=1, le=1000)] = 20) -> Response:
        """Returns the last prompts that the run answered."""
        runs.one(name)
        return Json({"samples": newest_answers(runs.folder(name), last)})

    @app.get("/api/runs/{name}/log")
    def log(name: str, after: Offset = None, most: Most = TAIL) -> Response:
        """Returns a part of what the newest process of a run printed."""
        runs.one(name)
        entry = training_of(runs, name)
        if entry is None:
            raise Refusal(404, "the run was started outside the board, which has no log of it", "no_log")
        return Json(log_part(board.queue.entries.folder / entry.id / LOG, after, most, not entry.is_live))

    @app.get("/api/runs/{name}/files/{inner:path}")
    def file(name: str, inner: str) -> Response:
        """Returns a file of the run's folder as a download."""
        runs.one(name)
        found = file_in(runs.folder(name), inner)
        return FileResponse(found, media_type="application/octet-stream", filename=found.name)


def _add_actions(app: FastAPI, board: Board) -> None:
    runs = board.runs

    @app.post("/api/runs/{name}/stop")
    def stop(request: Request, name: str, body: bodies.Empty) -> Response:  # noqa: ARG001
        """Saves, then ends."""
        return Json(board.stop(allowed(request), name, at_once=False).as_dict())

    @app.post("/api/runs/{name}/kill")
    def kill(request: Request, name: str, body: bodies.Empty) -> Response:  # noqa: ARG001
        """Ends at once, without saving."""
        return Json(board.stop(allowed(request), name, at_once=True).as_dict())

    @app.post("/api/runs/{name}/resume", status_code=201)
    def resume(request: Request, name: str, body: bodies.Resume) -> Response:
        """Queues the run to go on from its newest good checkpoint."""
        runs.check_name(name)
        entry, is_new = board.resume(allowed(request), body.key, name)
        return Json(entry.as_dict(), 201 if is_new else 200)

    @app.post("/api/runs/{name}/tags")
    def tags(request: Request, name: str, body: bodies.Beside) -> Response:
        """Replaces tags and note."""
        refuse_others(allowed(request), runs.one(name)["owner"])
        runs.write_beside(name, Beside(tags=[*dict.fromkeys(body.tags)], note=body.note))
        return Json(runs.one(name))


def _add_deletion(app: FastAPI, board: Board) -> None:
    runs = board.runs

    @app.get("/api/runs/{name}/delete")
    def would_free(name: str) -> Response:
        """Returns what deleting the run would free."""
        runs.one(name)
        files = files_of(runs.folder(name))
        size = sum(each["bytes"] for each in files)
        text = f"Frees {size_text(size)} in {counted(len(files), 'file')}. {WHAT_HAPPENS['delete']}"
        return Json({"bytes": size, "files": len(files), "text": text})

    @app.delete("/api/runs/{name}")
    def delete(request: Request, name: str) -> Response:
        """Deletes the run's folder and its entries."""
        return Json({"bytes": board.delete(allowed(request), name)})
