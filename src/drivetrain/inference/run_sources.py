"""Finds the run in a folder, and its checkpoints, without building the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from drivetrain.checkpoint.directory import newest_good, read_manifest, steps
from drivetrain.checkpoint.run_state import verify_weights
from drivetrain.config.files import read_yaml
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.errors import UserError, problem
from drivetrain.runtime.checkpoint_names import check_named, none_good
from drivetrain.runtime.run_folder import RunFolder, run_around
from drivetrain.training.report import RunReport

LOG = logging.getLogger(__name__)
Folder = str | os.PathLike[str] | RunReport


def run_of(folder: Folder) -> RunConfig:
    """Returns the run in a folder, which may have been moved. Raises UserError if there is none."""
    place = folder.folder if isinstance(folder, RunReport) else Path(folder).expanduser()
    file = RunFolder(place).run_file
    if not file.is_file():
        why = f"{place} holds no run: it has no {file.name}" if place.is_dir() else f"there is no folder {place}"
        raise problem("folder", why, "give the folder of a run (runs/NAME), or the report that train returned")
    return run_in(file, output=str(place))


def run_in(file: Path, **given: str) -> RunConfig:
    """Returns the run of a run file. given: keys that are others. Raises UserError with all that is wrong with it."""
    run, problems = validate({"name": file.stem, **read_yaml(file), **given}, [])
    if run is None or problems:
        raise UserError(problems)
    return fetched(run, data=False) if run.adapter else run  # whose base is no part of a checkpoint


def run_at(source: Path, checkpoint: str) -> tuple[RunConfig, Path] | None:
    """Returns the run that a folder, a run file or a checkpoint's folder belongs to, and the checkpoint; None where
    there is no run. checkpoint: "best", "last" or a folder, where the source is no checkpoint itself."""
    place = source.expanduser()
    if place.suffix in (".yaml", ".yml") and place.is_file():
        place = run_in(place).folder
    if RunFolder(place).run_file.is_file():
        run = run_of(place)
        return run, checkpoint_of(run, checkpoint)
    if (folder := run_around(place)) is not None:
        run = run_of(folder.path)
        return run, checkpoint_of(run, str(place))
    return None


def checkpoint_of(run: RunConfig, given: str) -> Path:
    """Returns the folder of the best or the last checkpoint, or the named one, without building the run."""
    root = RunFolder(run.folder).checkpoints
    if given not in ("best", "last"):
        return check_named(given, root, "checkpoint")
    newest, _ = newest_good(root, verify_weights)
    if newest is None:
        raise none_good(root, "checkpoint")
    wanted = (read_manifest(newest).facts.get("best") or {}).get("step")
    if given == "last" or wanted is None:
        return newest
    of_step = (path for path in steps(root) if read_manifest(path).step == wanted)
    found = next((path for path in of_step if not verify_weights(path)), None)
    if found is None:
        LOG.warning("the best evaluation (step %s) has no good checkpoint: taking %s", wanted, newest)
    return found or newest
