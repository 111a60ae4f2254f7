"""The application: its guards, its errors, the page's files and the login; the rest of its routes is in files beside
this one."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from drivetrain import __version__
from drivetrain.board import comparison_routes, form_routes, job_routes, queue_routes, run_routes
from drivetrain.board.access import USER, Access, LoginGuard, cookies_of
from drivetrain.board.answers import Json, user_of
from drivetrain.board.audit import Audit
from drivetrain.board.board import Board
from drivetrain.board.bodies import Empty, Login
from drivetrain.board.static_files import PageFiles
from drivetrain.config.packages import installed
from drivetrain.errors import RunError, UserError, clipped
from drivetrain.web.bodies import BodyGuard, BodyLimits
from drivetrain.web.browser_guard import BrowserGuard
from drivetrain.web.json_bodies import JsonRoute
from drivetrain.web.refusals import Refusal
from drivetrain.web.response_headers import ResponseHeaders
from drivetrain.web.scopes import address_of

OPEN = ("/login", "/static/login.js", "/static/login.css", "/static/icon.svg")
MOST_LOGIN = 8 << 10  # bytes of a body of which it is not known yet who sends it
MOST_JSON = 32 << 20  # of one that is no upload: 200 texts to predict for, with each sign as six
MOST_UPLOAD = 64 << 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Guards:
    """names: of the host, besides localhost; addresses: whether the board is reached by addresses of its machine other
    than loopback's; base: the path below which a proxy passes requests on with their whole path."""

    names: Sequence[str] = ()
    addresses: bool = False
    base: str = ""
    bodies: BodyLimits = field(default_factory=lambda: BodyLimits(bytes=MOST_UPLOAD))


def application(board: Board, access: Access, audit: Audit, guards: Guards) -> ASGIApp:
    """Returns the ASGI application."""
    app = FastAPI(
        title="Drivetrain board",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.router.route_class = JsonRoute
    _add_errors(app)
    _add_page(app)
    _add_access(app, board, access)
    form_routes.add(app, board)
    queue_routes.add(app, board)
    run_routes.add(app, board)
    job_routes.add(app, board)
    comparison_routes.add(app, board)
    found: ASGIApp = BodyGuard(audit.around(app), guards.bodies, most_bytes)
    found = LoginGuard(found, access, OPEN)
    found = BrowserGuard(found, guards.names, guards.addresses)
    return BasePath(ResponseHeaders(found, POLICY), guards.base)


def most_bytes(scope: Scope) -> int:
    """Returns how long the body of a request may be."""
    if scope.get(USER) is None:
        return MOST_LOGIN
    return MOST_UPLOAD if scope["path"] == "/api/uploads" else MOST_JSON


class BasePath:
    """ASGI middleware: takes the path of a proxy off the beginning of a request's."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app, self._base = app, base.rstrip("/")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if self._base and path.startswith(f"{self._base}/"):
            scope = {**scope, "path": path.removeprefix(self._base), "raw_path": None}
        await self._app(scope, receive, send)


def _add_page(app: FastAPI) -> None:
    """Adds the files of the page. They are in memory: a thread for each request would cost more than its answer."""
    files = PageFiles()

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files.answer("index.html", request)

    @app.get("/login", include_in_schema=False)
    async def login_page(request: Request) -> Response:
        return files.answer("login.html", request)

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        return files.answer(name, request)


def _add_access(app: FastAPI, board: Board, access: Access) -> None:
    @app.post("/login")
    def login(request: Request, body: Login) -> Response:
        """Exchanges a token for a cookie."""
        user = access.of_token(body.token, address_of(request.scope))
        answer = Json({"user": user.as_dict()})
        # without a path: that of /login as the browser sees it, whatever a proxy put before it
        secure = request.headers.get("origin", "").startswith("https:")
        answer.set_cookie(
            access.cookie, access.cookie_of(user), path=None, httponly=True, samesite="strict", secure=secure
        )
        return answer

    @app.post("/api/logout")
    def logout(request: Request, body: Empty) -> Response:  # noqa: ARG001
        """Ends the cookie."""
        for value in cookies_of(request.scope, access.cookie):
            access.end(value)
        return Response(status_code=204)

    @app.get("/api/me")
    def me(request: Request) -> Response:
        """Returns who is logged in, and where."""
        import platform

        return Json(
            {
                "user": user_of(request).as_dict(),
                "version": __version__,
                "runs_folder": str(board.root),
                "data_folders": [str(each) for each in board.data],
                "host": platform.node(),
                "python": platform.python_version(),
                "packages": sorted(installed()),
            }
        )


def _why(given: object, why: str) -> str:
    """Returns what is wrong with a value of a body, in the form in which a run file's problems say it."""
    why = why[:1].lower() + why[1:]
    return f"{clipped(str(given), 40)} was given; {why}" if isinstance(given, str | int | float) else why


def _add_errors(app: FastAPI) -> None:
    """Puts every error into one form."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(UserError)
    async def wrong(_: Request, error: UserError) -> Response:
        refusal = Refusal(422, "; ".join(f"{each.field}: {each.why}" for each in error.problems), "refused")
        return Json({**refusal.body, "problems": [each.as_dict() for each in error.problems]}, 422)

    @app.exception_handler(RunError)
    async def failed(_: Request, error: RunError) -> Response:
        return Refusal(500, str(error), "failed").response()

    @app.exception_handler(OSError)
    async def full(_: Request, error: OSError) -> Response:
        """Entries and settings are written aside and renamed: where there is no room, nothing has changed."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return Refusal(
            507, "the disk of the runs is full: nothing was changed. Delete runs or other files", "disk_full"
        ).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = [
            (clipped(".".join(map(str, each["loc"][1:])) or "body", 80), str(each["msg"]), each.get("input"))
            for each in error.errors()[:10]
        ]
        refusal = Refusal(400, "; ".join(f"{place}: {why}" for place, why, _ in found), "invalid_request", found[0][0])
        problems = [{"field": place, "why": _why(given, why), "fix": ""} for place, why, given in found]
        return Json({**refusal.body, "problems": problems}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = clipped(request.scope["path"], 80)
        why = {404: f"there is no {path} here", 405: f"{request.method} is not for {path}"}
        message = why.get(error.status_code, str(error.detail))
        return Refusal(error.status_code, message, "http_error", headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:
        return Refusal(500, "the board failed; its terminal has the reason", "internal_error").response()
