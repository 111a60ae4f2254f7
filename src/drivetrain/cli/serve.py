"""The verb serve: a model behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from drivetrain.cli.arguments import CheckpointOption, ModelPlace, TrustOption, path_option
from drivetrain.cli.console import errors


def serve(
    place: ModelPlace,
    checkpoint: CheckpointOption = "best",
    host: Annotated[str, typer.Option(help="Address to listen at; one that others reach needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    unix_socket: Annotated[
        Path | None, path_option("--unix-socket", help="Listen at this file, which you alone may open.")
    ] = None,
    key_file: Annotated[
        Path | None, path_option("--key-file", help="Keys, one a line; $DRIVETRAIN_API_KEY is one too.")
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option("--host-name", help="A name by which clients reach it, besides localhost.")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers in the making and waiting; more get 429.")] = 512,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of each key, or address; left out, as many as come.")
    ] = None,
    request_seconds: Annotated[float, typer.Option(min=1, help="Most time for the answers to one request.")] = 600,
    stop_seconds: Annotated[int, typer.Option(min=0, help="Time for running answers after Ctrl-C or SIGTERM.")] = 30,
    trust: TrustOption = False,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions and others of OpenAI's API."""
    from drivetrain.config.packages import require

    require("serve", ["fastapi", "uvicorn", "prometheus_client"])
    from drivetrain.inference.loading import load_model
    from drivetrain.inference.serve.start import Limits, check_address
    from drivetrain.inference.serve.start import serve as serve_model
    from drivetrain.web.keys import read_keys
    from drivetrain.web.server import Address, bound

    address, keys = Address(host, port, unix_socket), read_keys(key_file)
    check_address(address, keys)
    listening = bound(address)  # before the model is loaded, which takes longer
    errors.print(f"[dim]loading {escape(str(place))}[/]", soft_wrap=True)
    model = load_model(place, checkpoint=checkpoint, trust=trust)
    where = f"at {unix_socket}" if unix_socket else f"at http://{shown_host(host)}:{listening.getsockname()[1]}/v1"

    def ready() -> None:
        errors.print(f"{escape(model.name)} is served {escape(where)} (Ctrl-C stops)", soft_wrap=True)
        if not keys and unix_socket is None:
            errors.print("[yellow]note[/] without a key every user of this machine can ask it: --key-file FILE")

    limits = Limits(answers, request_seconds, requests_per_minute, stop_seconds)
    serve_model(model, listening, address, keys, host_name or [], limits, ready)
    errors.print("stopped")


def shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
