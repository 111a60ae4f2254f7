"""Converts others' checkpoints into the folder of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint.convert.foreign import Note, Theirs
from drivetrain.checkpoint.convert.formats import reader_of
from drivetrain.checkpoint.convert.onto_run import put, refuse
from drivetrain.config.load import load
from drivetrain.config.resolve import resolved
from drivetrain.config.rules import check_anywhere
from drivetrain.errors import UserError, last_line, problem
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.lock import held
from drivetrain.runtime.run_folder import refuse_code_of_folders


def convert_from(
    folder: Path,
    format_: str | None,
    run_file: Path,
    overrides: Sequence[str],
    step: int | None,
    weights_only: bool,
    trust: bool,
) -> tuple[str, Path, list[Note]]:
    """Converts another software's checkpoint. Returns its format, the new checkpoint in the run's folder, and the
    notes."""
    run, problems = load(run_file, overrides)
    if run is None or problems:
        raise UserError(problems)
    refuse_code_of_folders(run, run_file, trust)
    machine = detect("cpu")
    run = resolved(run, machine)
    if problems := check_anywhere(run):  # what it asks of a machine is asked where it is trained
        raise UserError(problems)
    refuse(run)
    found, read = reader_of(folder, format_)
    theirs = _read(read, folder, found)
    if weights_only:
        theirs.moments = None
        theirs.notes.append(Note("optimizer's states", carried=False, what="--weights-only was given"))
    with held(run.folder):
        checkpoint, notes = put(theirs, run, machine, step, folder)
    return found, checkpoint, notes


def _read(read: Callable[[Path], Theirs], folder: Path, format_: str) -> Theirs:
    """Turns the errors that readers raise on truncated or missing files into a UserError."""
    try:
        return read(folder)
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # which derives from BaseException
        why = f"{folder} cannot be read as {format_}: {last_line(error)}"
        raise problem("PATH", why, "give a complete folder, copied or saved again") from error
