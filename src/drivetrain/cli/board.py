"""The verb board: the no-code page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import path_option
from drivetrain.cli.console import errors
from drivetrain.cli.serve import shown_host
from drivetrain.errors import problem

PACKAGES = ("fastapi", "uvicorn")


def board(
    runs: Annotated[Path, path_option("--runs", help="Folder of runs: those there are shown, new ones go there.")] = (
        Path("runs")
    ),
    data: Annotated[
        list[Path] | None, path_option("--data", help="Folder that the file picker shows; several are possible.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    unix_socket: Annotated[
        Path | None, path_option("--unix-socket", help="Listen at this file, which you alone may open.")
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option("--host-name", help="A name by which browsers reach it, besides localhost.")
    ] = None,
    base_path: Annotated[
        str, typer.Option("--base-path", help="Path below which a proxy passes requests on, if it keeps that path.")
    ] = "",
    users: Annotated[
        Path | None, path_option("--users", help="Further users, a line each: NAME ROLE TOKEN (viewer, operator, ...).")
    ] = None,
    operators_code: Annotated[
        bool, typer.Option("--operators-code", help="Operators' run files may name Python, and any file.")
    ] = False,
    webhook: Annotated[
        str | None, typer.Option(help="Address that gets a JSON message at the end of each run, evaluation, export.")
    ] = None,
) -> None:
    """Open the no-code page: train, watch, compare, evaluate and export in a browser."""
    from drivetrain.config.packages import require

    require("board", PACKAGES, extra="board")
    from drivetrain.board.access import read_users
    from drivetrain.board.notify import check_address
    from drivetrain.board.start import serve
    from drivetrain.web.server import Address, bound

    folders = data or [Path.cwd()]
    missing = [str(each) for each in folders if not each.is_dir()]
    if missing:
        raise problem("--data", f"{', '.join(missing)}: there is no such folder", "give folders that are there")
    if base_path and not base_path.startswith("/"):
        raise problem("--base-path", f"{base_path} was given", "begin with /")
    others, names = read_users(users), host_name or []
    if webhook is not None:
        check_address(webhook)
    address = Address(host, port, unix_socket)
    listening = bound(address)

    def ready(token: str) -> None:
        if unix_socket is not None:
            errors.print(f"the board listens at {escape(str(unix_socket))}; its token is {token}", soft_wrap=True)
            return
        place = f"http://{shown_host(host)}:{listening.getsockname()[1]}{base_path.rstrip('/')}/login#{token}"
        errors.print(f"the board is open at\n  {escape(place)}\n(Ctrl-C closes it; what runs goes on)", soft_wrap=True)
        if address.is_public:
            errors.print(
                "[yellow]note[/] other machines reach it, unencrypted: put a proxy with TLS before it, or stay at "
                "127.0.0.1 and use ssh -L"
            )

    places = [each.resolve() for each in folders]
    serve(runs.absolute(), places, listening, address, names, base_path, others, operators_code, webhook, ready)
    errors.print("closed")
