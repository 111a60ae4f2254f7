"""The folder of a run in place of a model or an adapter: its best checkpoint is taken, as `drivetrain chat` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.config.base import Frozen
from drivetrain.config.files import read_yaml
from drivetrain.errors import UserError

Block = TypeVar("Block", bound=Frozen)
FIELDS = ("path", "tokenizer", "model")  # that name a model or its tokenizer, outside the blocks of data
DATA = "data"
LINKS = ("best", "last")  # to checkpoints, in a run's folder; the first is missing where nothing was evaluated
OF_ADAPTER = "adapter_config.json"
FILES = ("config.json", OF_ADAPTER)  # one of which the folder of a model, or of an adapter, has
# names of folders within a run's, which say nothing about the run
WITHIN_A_RUN = re.compile(r"best|last|checkpoints|(step|checkpoint)-\d+|exports?|exported|\.{0,2}")


def with_checkpoints(block: Block) -> Block:
    """Returns a block of a run file with the folder of a checkpoint in place of each run's folder that names a
    model."""
    changed = {}
    for name in type(block).model_fields:
        if name != DATA:
            value = getattr(block, name)
            found = _replaced(value, name in FIELDS)
            if found is not value:
                changed[name] = found
    return block.model_copy(update=changed) if changed else block


def _replaced(value: Any, names_a_model: bool) -> Any:
    if isinstance(value, Frozen):
        return with_checkpoints(value)
    if isinstance(value, list):
        found = [_replaced(each, names_a_model) for each in value]
        return found if any(a is not b for a, b in zip(found, value, strict=True)) else value
    return checkpoint_of_run(value) if names_a_model and isinstance(value, str) else value


def name_of(place: str) -> str:
    """Returns the name of the run that the folder of a model lies in, as far as its path shows it: "a" of
    runs/a/checkpoints/step-00000020, runs/a/best and runs/a/export. Elsewhere the last part of the path or hub id."""
    parts = re.split(r"[/\\]+", place.rstrip("/\\"))
    return next((part for part in reversed(parts) if not WITHIN_A_RUN.fullmatch(part)), parts[-1])


def checkpoint_of_run(place: str, files: Sequence[str] = FILES) -> str:
    """Returns the folder of the best checkpoint of the run in a folder, or of the last one where none was evaluated;
    any other place unchanged. files: names, one of which the folder of the checkpoint must have.

    The folder that the link leads to, and not the link, is what the resolved run file keeps: the link moves where the
    other run is trained further.
    """
    folder = Path(place).expanduser()
    if not (folder / "run.yaml").is_file() or any((folder / name).is_file() for name in files):
        return place
    for link in (folder / name for name in LINKS):
        if link.is_symlink() and any((link / name).is_file() for name in files):
            return str(Path(place) / link.readlink())
    return place


def stage_of_checkpoint(place: str) -> str | None:
    """Returns the training stage of the run in whose folder a checkpoint lies, as its run.yaml has it; None where none
    is known."""
    folder = Path(place).expanduser().resolve()
    file = next((each / "run.yaml" for each in folder.parents[:2] if (each / "run.yaml").is_file()), None)
    try:
        workload = {} if file is None else read_yaml(file).get("workload")
    except UserError:  # the file only explains
        return None
    stage = workload.get("stage") if isinstance(workload, dict) else None
    return stage if isinstance(stage, str) else None
