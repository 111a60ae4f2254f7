"""Recognises the format of a folder, and finds its reader and writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from drivetrain.checkpoint.convert import accelerate_folder, dcp, transformers_folder, universal, zero
from drivetrain.checkpoint.convert.foreign import Note, Theirs
from drivetrain.checkpoint.convert.own_format import Ours
from drivetrain.checkpoint.directory import MANIFEST
from drivetrain.errors import problem

Write = Callable[[Ours, Path, torch.dtype | None], list[Note]]
WRITERS: dict[str, Write] = {
    "transformers": transformers_folder.write,
    "dcp": dcp.write,
    "deepspeed": universal.write,
    "accelerate": accelerate_folder.write,
}
READERS: dict[str, Callable[[Path], Theirs]] = {
    "transformers": transformers_folder.read,
    "dcp": dcp.read,
    "deepspeed": zero.read,
    "accelerate": accelerate_folder.read,
}
# what only one of them has, in the order in which it decides: Accelerate's folders hold DeepSpeed's and DCP's
SIGNS = {
    "dcp": (dcp.METADATA,),
    "deepspeed": (zero.LATEST, universal.LATEST, "zero/*", "*model_states.pt", "*_optim_states.pt"),
    "accelerate": ("random_states_*.pkl", accelerate_folder.OPTIMIZER, *accelerate_folder.SHARDED),
    "transformers": (
        "config.json",
        "trainer_state.json",
        "adapter_config.json",
        "model*.safetensors*",
        "pytorch_model*",
    ),
}
SHOWN = 8


def reader_of(folder: Path, given: str | None) -> tuple[str, Callable[[Path], Theirs]]:
    """Returns the format and its reader. Raises UserError for a folder of no format, or of another than the caller
    named."""
    found = recognised(folder)
    if given is None and found is None:
        why = f"{folder} is of no format that is known ({', '.join(READERS)}): {_listed(folder)}"
        raise problem("PATH", why, "give the folder that the checkpoint was saved into")
    if given is not None and found != given:
        is_what = f"looks like {found}" if found else f"has nothing of {given}"
        raise problem("--from", f"{given} was given, and {folder} {is_what}: {_listed(folder)}", _fix(found))
    assert found is not None
    return found, READERS[found]


def recognised(folder: Path) -> str | None:
    """Returns the format. Raises UserError for a path that is no folder, or a checkpoint of this project."""
    if not folder.is_dir():
        raise problem("PATH", f"{folder} is no folder", "give the folder that the checkpoint was saved into")
    if (folder / MANIFEST).is_file() and any(folder.glob("training.json")):
        raise problem("--from", f"{folder} is a checkpoint of this project", "resume it, or convert it with --to")
    return next((name for name, signs in SIGNS.items() if any(any(folder.glob(sign)) for sign in signs)), None)


def _listed(folder: Path) -> str:
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"it holds {', '.join(names[:SHOWN]) or 'nothing'}{more}"


def _fix(found: str | None) -> str:
    return f"give --from {found}, or leave it out" if found else "give the folder that the checkpoint was saved into"
