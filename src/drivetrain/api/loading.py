"""`drivetrain.load`: a run's folder → an nn.Module with its weights, without reading its data."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from torch import nn

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.settings import read_run
from drivetrain.checkpoint.directory import newest_good, read_manifest, steps
from drivetrain.checkpoint.run_state import verify_weights
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError, problem
from drivetrain.inference.whole_model import loaded_model
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.report import RunReport

LOG = logging.getLogger(__name__)
Folder = str | os.PathLike[str] | RunReport


def load(
    folder: Folder,
    checkpoint: str = "best",
    *,
    model: nn.Module | None = None,
    adapter: Literal["merge", "keep"] = "merge",
    trust: bool = False,
) -> nn.Module:
    """Returns the model of a run with the weights of a checkpoint: on the CPU, in fp32, in evaluation mode.

    folder: a run's folder, or the report that drivetrain.train returned. checkpoint: "best", "last", or the folder of
    one. model: required for a run that was trained on objects; it is filled and returned. A run of a Python file makes
    its model by that file; a Transformers model needs neither data nor network, except that adapters need their base.

    adapter: "merge" adds LoRA's and IA3's products to the weights, so that the model has the class and the names of its
    base (a base that was kept in 4 or 8 bits is taken unquantised); "keep" leaves them beside it, as PEFT has them.
    Prompts and prefixes cannot be merged and always stay.

    The model of a text workload has its tokenizer as `model.tokenizer`.

    Raises UserError for a folder without such a checkpoint, weights of another model, and Python that the folder names
    from outside the current one, unless trust is set (docs/reference/security.md).
    """
    with as_a_caller_reads_them():
        if adapter not in ("merge", "keep"):
            raise problem("adapter", f"{adapter!r} was given", 'give "merge" or "keep"')
        run = run_of(folder)
        path = checkpoint_of(run, checkpoint)
        return loaded_model(run, path, model, adapter, trust)


def run_of(folder: Folder) -> RunConfig:
    """Returns the run in a folder, which may have been moved. Raises UserError if there is none."""
    place = folder.folder if isinstance(folder, RunReport) else Path(folder).expanduser()
    file = RunFolder(place).run_file
    if not file.is_file():
        why = f"{place} holds no run: it has no {file.name}" if place.is_dir() else f"there is no folder {place}"
        raise problem("folder", why, "give the folder of a run (runs/NAME), or the report that train returned")
    run, problems, _ = read_run(file, {"output": place})
    if run is None or problems:
        raise UserError(problems)
    return run


def checkpoint_of(run: RunConfig, given: str) -> Path:
    """Returns the folder of the best or the last checkpoint, or the named one, without building the run."""
    if given not in ("best", "last"):
        if not Path(given).is_dir():
            raise problem("checkpoint", f"{given} is no checkpoint folder", "give best, last or a folder step-...")
        return Path(given)
    root = RunFolder(run.folder).checkpoints
    newest, _ = newest_good(root, verify_weights)
    if newest is None:
        raise problem("checkpoint", f"{root} holds no good checkpoint", "train first, or give the folder of one")
    wanted = (read_manifest(newest).facts.get("best") or {}).get("step")
    if given == "last" or wanted is None:
        return newest
    of_step = (path for path in steps(root) if read_manifest(path).step == wanted)
    found = next((path for path in of_step if not verify_weights(path)), None)
    if found is None:
        LOG.warning("the best evaluation (step %s) has no good checkpoint: taking %s", wanted, newest)
    return found or newest
