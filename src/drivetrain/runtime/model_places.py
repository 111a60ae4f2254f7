"""Refuses places of models that are not there, by their names alone: before anything that takes seconds is imported."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.files import RUN_FILES, near_run, read_text, refuse_mistyped_run
from drivetrain.errors import problem
from drivetrain.runtime.checkpoint_names import check_there
from drivetrain.runtime.hub import refuse_out_of_reach
from drivetrain.runtime.run_folder import RunFolder


def refuse_absent_model(path: str, field: str) -> None:
    """Raises UserError for a path that is not there, and can be no model's name on a hub."""
    folder = Path(path).expanduser()
    if folder.exists():
        return
    if folder.suffix in RUN_FILES:
        read_text(folder, 0)  # which says what lies beside it
    is_path = path.startswith((".", "/", "~")) or len(Path(path).parts) > 2
    if is_path or len(Path(path).parts) == 2:  # one word may be a hub's (gpt2), whatever lies in the current folder
        refuse_mistyped_run(folder)  # it is no name on a hub
    if is_path:
        raise problem(field, f"{path} does not exist", f"relative paths are taken from {Path.cwd()}")


def refuse_unknown_model(path: str, field: str) -> None:
    """Does the same, and raises UserError for a hub's model too where the hub is out of reach."""
    refuse_absent_model(path, field)
    if not Path(path).expanduser().exists():
        refuse_out_of_reach(path, field, near_run(Path(path)))


def refuse_absent_source(path: str, checkpoint: str) -> None:
    """Raises UserError for a model that is asked, or a checkpoint of its run, that is not there."""
    refuse_unknown_model(path, "MODEL")
    run = RunFolder(Path(path).expanduser())
    if run.run_file.is_file():
        check_there(checkpoint, run.checkpoints, "--checkpoint")
