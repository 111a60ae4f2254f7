"""Routes of comparisons: started from the form, listed, looked at, downloaded as a page, deleted."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response

from drivetrain.board import bodies, comparisons
from drivetrain.board.answers import Json, allowed
from drivetrain.board.board import Board
from drivetrain.board.run_record import as_download


def add(app: FastAPI, board: Board) -> None:
    @app.get("/api/comparisons")
    def listed() -> Response:
        """Returns all comparisons, the newest first."""
        return Json({"comparisons": comparisons.listed(board)})

    @app.post("/api/comparisons", status_code=201)
    def start(request: Request, body: bodies.Compare) -> Response:
        """Queues a comparison: the run file along several axes, a run a cell and seed."""
        wanted = comparisons.Wanted(body.yaml, tuple(body.axes), body.seeds, body.devices)
        entry, is_new = comparisons.start(board, allowed(request), body.key, wanted)
        return Json(entry.as_dict(), 201 if is_new else 200)

    @app.get("/api/comparisons/{name}")
    def one(name: str) -> Response:
        """Returns a comparison: its state, its rows and its advice."""
        return Json(comparisons.one(board, name))

    @app.get("/api/comparisons/{name}/page")
    def page(name: str) -> Response:
        """Returns the comparison as a page of a single file, as a download."""
        file = comparisons.page(board, name)
        return FileResponse(file, media_type="text/html", headers=as_download(f"{name}.html"))

    @app.delete("/api/comparisons/{name}")
    def delete(request: Request, name: str) -> Response:
        """Deletes the comparison's folder with its runs, and its entries."""
        return Json({"bytes": comparisons.delete(board, allowed(request), name)})
