"""The verb serve: a model behind OpenAI's API."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from drivetrain.cli.arguments import CheckpointOption, ModelPlace, TrustOption, path_option
from drivetrain.cli.console import errors


class Backend(StrEnum):
    OWN, VLLM = "own", "vllm"


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
    backend: Annotated[
        Backend, typer.Option(help="The project's own server, or vLLM on an exported model, where it is installed.")
    ] = Backend.OWN,
    trust: TrustOption = False,
) -> None:
    """Serve a model over HTTP: a language model by OpenAI's API, an encoder's embeddings, a classifier's classes."""
    if backend is Backend.VLLM:
        given = {"--key-file": key_file, "--host-name": host_name, "--requests-per-minute": requests_per_minute}
        _become_vllm(place, host, port, unix_socket, {name: value is not None for name, value in given.items()})
    from drivetrain.config.packages import require

    require("serve", ["fastapi", "uvicorn", "prometheus_client"])
    from drivetrain.inference.encoders import ENCODER, PICTURES, TEXTS, kind_of, load_reader
    from drivetrain.inference.loading import load_model
    from drivetrain.inference.serve.start import Limits, check_address
    from drivetrain.inference.serve.start import serve as serve_model
    from drivetrain.web.keys import read_keys
    from drivetrain.web.server import Address, bound

    address, keys = Address(host, port, unix_socket), read_keys(key_file)
    check_address(address, keys)
    listening = bound(address)  # before the model is loaded, which takes longer
    errors.print(f"[dim]loading {escape(str(place))}[/]", soft_wrap=True)
    if (kind := kind_of(place, checkpoint, trust)) in (TEXTS, PICTURES, ENCODER):
        model: Any = load_reader(place, kind, checkpoint=checkpoint, trust=trust)
    else:
        model = load_model(place, checkpoint=checkpoint, trust=trust)
    where = f"at {unix_socket}" if unix_socket else f"at http://{shown_host(host)}:{listening.getsockname()[1]}/v1"

    def ready() -> None:
        errors.print(f"{escape(model.name)} is served {escape(where)} (Ctrl-C stops)", soft_wrap=True)
        if not keys and unix_socket is None:
            errors.print("[yellow]note[/] without a key every user of this machine can ask it: --key-file FILE")

    limits = Limits(answers, request_seconds, requests_per_minute, stop_seconds)
    serve_model(model, listening, address, keys, host_name or [], limits, ready)
    errors.print("stopped")


def _become_vllm(place: Path, host: str, port: int, unix_socket: Path | None, unheeded: dict[str, bool]) -> NoReturn:
    from drivetrain.inference.serve.vllm import KEY, vllm_command
    from drivetrain.web.server import Address

    command = vllm_command(place, Address(host, port, unix_socket), os.environ.get(KEY), unheeded)
    errors.print(f"[dim]{escape(' '.join(command))}[/]", soft_wrap=True)
    os.execvp(command[0], command)


def shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
