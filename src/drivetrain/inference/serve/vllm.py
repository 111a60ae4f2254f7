"""vLLM in the place of our own server: the command that starts it on an exported model, within the same rules."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from drivetrain.errors import Problem, UserError
from drivetrain.inference.run_sources import run_at
from drivetrain.web.server import Address

KEY = "VLLM_API_KEY"  # where vLLM reads its key: on a command line every user of the machine would see it


def vllm_command(source: Path, address: Address, key: str | None, unheeded: Mapping[str, bool]) -> list[str]:
    """Returns the command. key: that clients give. unheeded: options of ours that vLLM has no counterpart of → whether
    they were given.

    Raises UserError with all that is wrong: no vLLM, a source that it cannot read, options that it could not heed.
    """
    problems = [Problem(name, "vLLM has no such option", "leave it out") for name, given in unheeded.items() if given]
    if shutil.which("vllm") is None:
        why = "the program vllm is not installed here"
        problems.append(Problem("--backend", why, "pip install vllm in its own environment, or leave --backend out"))
    folder = source.expanduser()
    if run_at(source, "best") is not None:
        fix = f"drivetrain export {source} --to transformers --output FOLDER, then serve FOLDER"
        problems.append(Problem("model", "vLLM reads exported models, and no runs", fix))
    elif not (folder / "config.json").is_file():
        why = f"{source} holds no config.json"
        problems.append(Problem("model", why, "give the folder of `drivetrain export --to transformers`"))
    if address.is_public and key is None:
        why = f"other machines reach {address.host}, and there is no key"
        problems.append(Problem("--host", why, f"set ${KEY}, or stay at 127.0.0.1 and reach it through ssh -L"))
    if problems:
        raise UserError(problems)
    where = ["--host", address.host, "--port", str(address.port)]
    if address.unix_socket is not None:
        where = ["--uds", str(address.unix_socket)]
    return ["vllm", "serve", str(folder.resolve()), "--served-model-name", folder.resolve().name, *where]
