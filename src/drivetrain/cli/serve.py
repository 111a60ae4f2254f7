"""The verb serve: a model behind OpenAI's API."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from drivetrain.cli.arguments import (
    CheckpointOption,
    ModelPlace,
    TrustOption,
    as_typed,
    checkpoint_here,
    here,
    path_option,
    was_given,
)
from drivetrain.cli.console import errors
from drivetrain.config.files import usable_path
from drivetrain.config.location import store_address
from drivetrain.errors import Problem, UserError, problem, together


class Backend(StrEnum):
    OWN, VLLM, SGLANG = "own", "vllm", "sglang"


# of the project's own server: vLLM and SGLang have other ones, or none
OWN_OPTIONS = (
    *("checkpoint", "adapter", "with_base", "key_file", "host_name", "answers", "requests_per_minute"),
    *("request_seconds", "stop_seconds", "trust"),
)
ADAPTER_NAME = re.compile("[A-Za-z0-9_-]+")  # as in run files


def serve(
    context: typer.Context,
    place: ModelPlace,
    checkpoint: CheckpointOption = "best",
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="An adapter over the model, which requests call by NAME; repeatable."),
    ] = None,
    with_base: Annotated[
        bool, typer.Option("--with-base", help="Let requests call the model without its adapter, by the name base.")
    ] = False,
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
        Backend, typer.Option(help="The project's own server, or vLLM or SGLang on an exported model, where installed.")
    ] = Backend.OWN,
    trust: TrustOption = False,
) -> None:
    """Serve a model over HTTP: a language model by OpenAI's API, an encoder's embeddings, a classifier's classes."""
    if backend is not Backend.OWN:
        given = {f"--{name.replace('_', '-')}": was_given(context, name) for name in OWN_OPTIONS}
        _become(backend, place, host, port, unix_socket, given)
    from drivetrain.config.packages import require

    require("serve", ["fastapi", "uvicorn", "prometheus_client"])
    adapters = adapters_of(adapter or [])
    if adapters and with_base:
        raise problem("--with-base", "--adapter was given too, whose base has a name already", "leave one of them out")
    from drivetrain.web.keys import read_keys
    from drivetrain.web.server import Address, bound, check_address

    address, keys = Address(host, port, unix_socket), read_keys(key_file)
    check_address(address, keys)
    _refuse_absent(place, checkpoint, adapters)
    from drivetrain.inference.encoders import ENCODER, PICTURES, TEXTS, kind_of, load_reader
    from drivetrain.inference.loading import load_model
    from drivetrain.inference.serve.start import Limits
    from drivetrain.inference.serve.start import serve as serve_model

    checkpoint = checkpoint_here(checkpoint)
    typed, place = place, here(place, [checkpoint], "MODEL")
    adapters = {name: here(folder, ["best"], "--adapter") for name, folder in adapters.items()}
    listening = bound(address)  # before the model is loaded, which takes longer
    errors.print(f"[dim]loading {escape(as_typed(typed))}[/]", soft_wrap=True)
    if (kind := kind_of(place, checkpoint, trust)) in (TEXTS, PICTURES, ENCODER):
        if adapters or with_base:
            option = "--adapter" if adapters else "--with-base"
            raise problem(option, f"{place} writes no texts, and such models take none", "leave it out")
        model: Any = load_reader(place, kind, checkpoint=checkpoint, trust=trust)
    else:
        model = load_model(place, checkpoint=checkpoint, adapters=adapters, trust=trust, with_base=with_base)
        if model.name in model.adapters:
            model.close()
            option, fix = ("--with-base", "leave it out") if with_base else ("--adapter", "give it another name")
            raise problem(option, f"{model.name} is the name of the model itself", fix)
    where = f"at {unix_socket}" if unix_socket else f"at http://{shown_host(host)}:{listening.getsockname()[1]}/v1"

    def ready() -> None:
        errors.print(f"{escape(model.name)} is served {escape(where)} (Ctrl-C stops)", soft_wrap=True)
        if not keys and unix_socket is None:
            errors.print("[yellow]note[/] without a key every user of this machine can ask it: --key-file FILE")

    limits = Limits(answers, request_seconds, requests_per_minute, stop_seconds)
    serve_model(model, listening, address, keys, host_name or [], limits, ready)
    errors.print("stopped")


def _refuse_absent(place: Path, checkpoint: str, adapters: Mapping[str, Path]) -> None:
    """Raises UserError for places that are not there, before what takes seconds is imported."""
    from drivetrain.runtime.model_places import refuse_absent_model, refuse_absent_source

    calls: list[Callable[[], None]] = [
        functools.partial(refuse_absent_model, str(each), "--adapter")
        for each in adapters.values()
        if store_address(each) is None
    ]
    if store_address(place) is None:
        calls.insert(0, functools.partial(refuse_absent_source, str(place), checkpoint))
    together(calls)


def adapters_of(given: Sequence[str]) -> dict[str, Path]:
    """Returns name → folder. Raises UserError with all that is wrong with them."""
    found, problems = dict[str, Path](), list[Problem]()
    for each in given:
        name, sign, folder = each.partition("=")
        if not (sign and folder) or ADAPTER_NAME.fullmatch(name) is None:
            fix = "write NAME=FOLDER, with a name of letters, digits, - and _"
            problems.append(Problem("--adapter", f"{each!r} was given", fix))
        elif name in found:
            problems.append(Problem("--adapter", f"two are called {name}", "give each another name"))
        else:
            found[name] = usable_path(folder)
    if problems:
        raise UserError(problems)
    return found


def _become(
    backend: Backend, place: Path, host: str, port: int, unix_socket: Path | None, unheeded: dict[str, bool]
) -> NoReturn:
    from drivetrain.inference.serve.other_servers import OTHER_SERVERS, command_of
    from drivetrain.web.server import Address

    server = OTHER_SERVERS[backend.value]
    key = None if server.key is None else os.environ.get(server.key)
    command = command_of(server, place, Address(host, port, unix_socket), key, unheeded)
    errors.print(f"[dim]{escape(' '.join(command))}[/]", soft_wrap=True)
    os.execvp(command[0], command)


def shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
