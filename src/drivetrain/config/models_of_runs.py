"""The folder of a run in place of a model: its best checkpoint is the model, as `drivetrain chat` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from drivetrain.config.base import Frozen

Block = TypeVar("Block", bound=Frozen)
FIELDS = ("path", "tokenizer", "model")  # that name a model or its tokenizer, outside the blocks of data
DATA = "data"
LINKS = ("best", "last")  # to checkpoints, in a run's folder; the first is missing where nothing was evaluated
FILES = ("config.json", "adapter_config.json")  # one of which the folder of a model, or of an adapter, has


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


def checkpoint_of_run(place: str) -> str:
    """Returns the folder of the best checkpoint of the run in a folder, or of the last one where none was evaluated;
    any other place unchanged.

    The folder that the link leads to, and not the link, is what the resolved run file keeps: the link moves where the
    other run is trained further.
    """
    folder = Path(place).expanduser()
    if not (folder / "run.yaml").is_file() or any((folder / name).is_file() for name in FILES):
        return place
    for link in (folder / name for name in LINKS):
        if link.is_symlink() and any((link / name).is_file() for name in FILES):
            return str(Path(place) / link.readlink())
    return place
