"""Routes of the form: fields, recipes, YAML and form both ways, checks, the command."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from drivetrain.board import run_file
from drivetrain.board.answers import Json, allowed, user_of
from drivetrain.board.board import Board
from drivetrain.board.bodies import Command, Edit, Import, Yaml
from drivetrain.board.form import form
from drivetrain.board.imports import accepts, imported
from drivetrain.board.static_files import Content
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.init.catalogue import recipe, recipes
from drivetrain.web.refusals import Refusal


def add(app: FastAPI, board: Board) -> None:
    _add_lists(app)
    _add_texts(app)
    _add_checks(app, board)


def _add_lists(app: FastAPI) -> None:
    @app.get("/api/schema")
    def schema(request: Request) -> Response:
        """Returns the fields of a run file and their groups. A key of a field that is missing is null, false or
        empty."""
        return _fields().answer(request)

    @app.get("/api/schema/json")
    def json_schema(request: Request) -> Response:
        """Returns the JSON Schema of the run file, as `drivetrain schema` prints it."""
        return _json_schema().answer(request)

    @app.get("/api/recipes")
    async def listed(request: Request) -> Response:
        """Returns the recipes that come with drivetrain."""
        return _recipes().answer(request)


def _add_texts(app: FastAPI) -> None:
    @app.post("/api/parse")
    def parse(body: Yaml) -> Response:
        """Returns the values of a run file."""
        values = run_file.values_of(body.yaml)
        return Json({"values": values, "flat": run_file.flat(values)})

    @app.post("/api/edit")
    def edit(body: Edit) -> Response:
        """Sets and removes keys; comments stay."""
        text = run_file.edited(body.yaml, body.set, body.remove)
        values = run_file.values_of(text)
        return Json({"yaml": text, "values": values, "flat": run_file.flat(values)})

    @app.post("/api/command")
    def command(body: Command) -> Response:
        """Returns the lines that one would type."""
        return Json(run_file.command(body.yaml, body.recipe))


def _add_checks(app: FastAPI, board: Board) -> None:
    @app.post("/api/check")
    def check(request: Request, body: Yaml) -> Response:
        """Returns all problems that the schema and the rules of this machine find, in milliseconds."""
        return Json(board.check(user_of(request), body.yaml).as_dict())

    @app.post("/api/check/full")
    def full_check(request: Request, body: Yaml) -> Response:
        """Returns what `drivetrain check` finds, which reads the data and builds the model."""
        user = allowed(request)
        board.refuse_named(user, body.yaml)
        checked = run_file.check(body.yaml, board.machine.machine())
        if checked.run is None or checked.problems:
            return Json(checked.as_dict())
        board.refuse_foreign(user, checked.run)
        return Json(board.verbs.check(user.name, body.yaml, board.runs.free_name(checked.run.name)))

    @app.get("/api/check/full")
    def checked_so_far(request: Request) -> Response:
        """Returns what a full check of the same user, which is still at work, has shown so far, and what it looks at
        next: data, model or plan. Null where it has shown nothing yet."""
        return Json({"so_far": board.verbs.checked_so_far(allowed(request).name)})

    @app.post("/api/import")
    def import_(request: Request, body: Import) -> Response:
        """Returns the run file that configurations of other software become, and what became of each of their keys."""
        user = allowed(request)
        try:
            return Json(imported(board, user, body.files, body.without))
        except UserError as error:
            refusal = Refusal(422, "; ".join(f"{each.field}: {each.why}" for each in error.problems), "refused")
            problems = [each.as_dict() for each in error.problems]
            return Json({**refusal.body, "problems": problems, "accepts": accepts(error.problems)}, 422)


@functools.cache  # these three are the same as long as the server runs: they are compressed at the first request
def _fields() -> Content:
    return _as_json(form())


@functools.cache
def _json_schema() -> Content:
    return _as_json(RunConfig.model_json_schema())


@functools.cache
def _recipes() -> Content:
    found = [(name, title, recipe(name).read_text(encoding="utf-8")) for name, title in recipes()]
    return _as_json({"recipes": [{"name": name, "title": title, "yaml": text} for name, title, text in found]})


def _as_json(value: dict[str, Any]) -> Content:
    return Content.of(bytes(Json(value).body), "application/json")
