"""Finds the checkpoint to use, and loads its weights into the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import check_fits, newest_good, read, read_manifest, refuse_damaged, steps
from drivetrain.checkpoint.retention import best
from drivetrain.checkpoint.run_state import OF_WEIGHTS, verify_weights
from drivetrain.config.run import RunConfig
from drivetrain.engines.base import Engine
from drivetrain.runtime.checkpoint_names import check_named, none_good
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Workload

FIELD = "--checkpoint"
LOG = logging.getLogger(__name__)


def find_checkpoint(run: RunConfig, workload: Workload, given: str) -> Path:
    """Finds a checkpoint whose weights verify. given: "best", "last" or a path. best: by the rule of
    best_evaluation.py; if none was evaluated, the newest. Raises UserError if there is none."""
    if given not in {"best", "last"}:
        return verified(Path(given), RunFolder(run.folder).checkpoints)
    root = RunFolder(run.folder).checkpoints
    metric = best_metric(run, workload)
    found = best(root, metric.higher_is_better, metric.name, verify_weights) if given == "best" else None
    found = found or newest_good(root, verify_weights)[0]
    if found is None:
        raise none_good(root, FIELD)
    if given == "best":
        _say_if_another(root, found, metric.name)
    return found


def _say_if_another(root: Path, found: Path, metric: str) -> None:
    """Warns if the run's best evaluation has no checkpoint: it was not saved, or is deleted or damaged."""
    wanted = next((best for path in reversed(steps(root)) if (best := _best_of_the_run(path))), None)
    if wanted and wanted["metric"] == metric and wanted["step"] != read_manifest(found).step:
        value = f"{metric} {wanted['value']:.4f} at step {wanted['step']}"
        LOG.warning("the best evaluation (%s) has no good checkpoint: taking %s", value, found)


def _best_of_the_run(path: Path) -> dict[str, Any] | None:
    """Returns the best evaluation up to a checkpoint, if its manifest has it."""
    try:
        found: dict[str, Any] | None = read_manifest(path).facts.get("best")
    except (OSError, ValueError):
        return None
    return found


def verified(folder: Path, root: Path | None = None) -> Path:
    """Returns the checkpoint's folder. Raises UserError if it is none, or its weights do not verify. root: where the
    run's other checkpoints are; left out, beside it."""
    path = check_named(str(folder), root or folder.parent, FIELD)
    refuse_damaged(path, verify_weights)
    return path


def load_into(engine: Engine, path: Path) -> None:
    """Loads the weights of a checkpoint that was verified into the engine's model. Raises UserError if they are of
    another model."""
    parts = read(path, OF_WEIGHTS)
    saved = parts["model"]
    check_fits(engine.shapes(), saved, path)
    for message in engine.check_base(path):
        LOG.warning(message)
    engine.load_weights(saved)
    engine.load_auxiliary(parts.get("auxiliary", {}))
