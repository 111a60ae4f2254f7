"""vLLM or SGLang in the place of our own server: the command that starts it on an exported model, within the same
rules."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.errors import Problem, UserError
from drivetrain.inference.run_sources import run_at
from drivetrain.web.server import Address


@dataclass(frozen=True)
class OtherServer:
    """A server of other software. begins: its words before the model's folder. key: the environment variable that it
    reads its key from, for on a command line every user of the machine would see it; None: it reads none. socket: its
    option for a Unix socket; None: it has none."""

    name: str
    program: str
    begins: tuple[str, ...]
    key: str | None
    socket: str | None


OTHER_SERVERS = {
    "vllm": OtherServer("vLLM", "vllm", ("serve",), "VLLM_API_KEY", "--uds"),
    # its --api-key is no way to give one: see `key`
    "sglang": OtherServer("SGLang", "sglang", ("serve", "--model-path"), None, None),
}


def command_of(
    server: OtherServer, source: Path, address: Address, key: str | None, unheeded: Mapping[str, bool]
) -> list[str]:
    """Returns the command that starts `server`. key: that clients give. unheeded: options of ours that it has no
    counterpart of → whether they were given.

    Raises UserError with all that is wrong: no such program, a source that it cannot read, options that it could not
    heed.
    """
    given = [name for name, was_given in unheeded.items() if was_given]
    if address.unix_socket is not None and server.socket is None:
        given.append("--unix-socket")
    problems = [Problem(name, f"{server.name} has no such option", "leave it out") for name in given]
    if shutil.which(server.program) is None:
        why = f"the program {server.program} is not installed here"
        fix = f"pip install {server.program} in its own environment, or leave --backend out"
        problems.append(Problem("--backend", why, fix))
    folder = source.expanduser()
    if run_at(source, "best") is not None:
        fix = f"drivetrain export {source} --to transformers --output FOLDER, then serve FOLDER"
        problems.append(Problem("model", f"{server.name} reads exported models, and no runs", fix))
    elif not (folder / "config.json").is_file():
        why = f"{source} holds no config.json"
        problems.append(Problem("model", why, "give the folder of `drivetrain export --to transformers`"))
    if address.is_public and key is None:
        stay = "stay at 127.0.0.1 and reach it through ssh -L"
        why = f"other machines reach {address.host}, and there is no key"
        fix = f"set ${server.key}, or {stay}"
        if server.key is None:
            why = f"other machines reach {address.host}, and {server.name} takes a key on its command line alone"
            fix = f"{stay}, or put a proxy with a key before it"
        problems.append(Problem("--host", why, fix))
    if problems:
        raise UserError(problems)
    where = ["--host", address.host, "--port", str(address.port)]
    if address.unix_socket is not None and server.socket is not None:
        where = [server.socket, str(address.unix_socket)]
    place = folder.resolve()
    return [server.program, *server.begins, str(place), "--served-model-name", place.name, *where]
