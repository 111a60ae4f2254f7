"""Converts a checkpoint of this project to others' formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint.convert.foreign import Note
from drivetrain.checkpoint.convert.formats import WRITERS
from drivetrain.checkpoint.convert.own_format import Ours, find, is_adapter, ours
from drivetrain.errors import UserError, last_line, problem
from drivetrain.runtime.new_folder import new_folder, refuse_taken

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert_to(path: Path, format_: str, output: Path, dtype: str | None) -> tuple[Path, list[Note]]:
    """Writes a checkpoint into `output`, a folder that does not exist yet or is empty. path: a checkpoint, or a run,
    whose newest good one is taken.

    The folder is written aside and renamed. Returns the checkpoint that was read, and the notes.
    """
    if format_ not in WRITERS:
        raise problem("--to", f"{format_} was given", f"known: {', '.join(WRITERS)}")
    if dtype is not None and (format_ != "transformers" or dtype not in DTYPES):
        why = f"{dtype} was given with --to {format_}"
        raise problem("--dtype", why, f"give {', '.join(DTYPES)} with --to transformers; others keep every bit")
    refuse_taken(output)
    source, skipped, saved = _newest(path)
    notes = written_aside(output, lambda aside: WRITERS[format_](saved, aside, DTYPES.get(dtype or "")))
    newer = [Note("newer checkpoint", carried=False, what=why) for why in skipped]
    return source, [*notes, *saved.notes, *_without(source), *newer]


def written_aside(output: Path, write: Callable[[Path], list[Note]]) -> list[Note]:
    """Has a folder written beside `output`, a new or empty folder, and renames it. Returns the notes of `write`."""
    try:
        with new_folder(output) as aside:
            return write(aside)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:  # as each of the writers puts it
        fix = "make room, or give another folder"
        raise problem("--output", f"{output} cannot be written: {last_line(error)}", fix) from error


def _newest(path: Path) -> tuple[Path, list[str], Ours]:
    """Returns the checkpoint, why newer ones were skipped, and its contents. A run in progress may delete one
    meanwhile."""
    source, skipped = find(path)
    try:
        return source, skipped, ours(source)
    except (UserError, OSError):
        if source.exists():
            raise
    source, skipped = find(path)
    return source, skipped, ours(source)


def _without(source: Path) -> list[Note]:
    """Notes what the checkpoint itself does not hold."""
    where = "the frozen base is where adapter_config.json names it; --merge writes both as one"
    what = f"the checkpoint holds adapters alone: {where}"
    return [Note("base", carried=False, what=what)] if is_adapter(source) else []
