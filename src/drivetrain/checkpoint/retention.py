"""Decides which checkpoints are kept, and deletes the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.checkpoint.best_evaluation import ranked
from drivetrain.checkpoint.directory import Check, hidden, read_manifest, steps, verify
from drivetrain.errors import RunError
from drivetrain.runtime import storage


def prune(
    root: Path,
    keep_last: int,
    keep_best: int,
    higher_is_better: bool,
    metric: str | None = None,
    saved: Path | None = None,
) -> None:
    """Deletes all but the newest `keep_last` and the best `keep_best` (by the metric in their manifests).

    If none of those verifies, the newest that does is kept besides. Raises RunError if one cannot be deleted. metric:
    its name; values of another metric are ignored. saved: the newest; later steps were passed over by a run that
    resumed before them, and are neither counted nor deleted.
    """
    everything = steps(root)
    made = everything[: everything.index(saved) + 1] if saved in everything else everything
    kept = set(made[-keep_last:]) | set(_by_metric(made, higher_is_better, metric)[:keep_best])
    doomed = [path for path in made if path not in kept]
    if not doomed:
        return
    # kept ones first: the newest was just written and is good, so that as a rule this reads a single checkpoint
    newest_first = sorted(reversed(made), key=lambda path: path not in kept)
    good = next((path for path in newest_first if not verify(path)), None)
    for path in doomed:
        if good is not None and path != good:
            _delete(path)


def best(root: Path, higher_is_better: bool, metric: str | None = None, check: Check = verify) -> Path | None:
    """Returns the best checkpoint that verifies, by the rule of best_evaluation.py; None if none was evaluated by the
    metric.

    One of a later step than the run resumed from was passed over because it does not verify.
    """
    return next((path for path in _by_metric(steps(root), higher_is_better, metric) if not check(path)), None)


def _by_metric(paths: Sequence[Path], higher_is_better: bool, metric: str | None) -> list[Path]:
    scored = []
    for path in paths:
        try:
            facts = read_manifest(path).facts
        except (OSError, ValueError):
            continue  # damaged: it cannot be called best, and resuming says what is wrong with it
        value, name = facts.get("metric"), facts.get("metric_name")
        if metric is not None and name not in (None, metric):
            continue
        if isinstance(value, int | float):
            scored.append((value, path))
    return ranked(scored, higher_is_better)


def _delete(path: Path) -> None:
    try:
        storage.delete(path, hidden(path, "deleted"))  # what stays of it goes when the next run cleans up
    except OSError as error:
        raise RunError(f"the old checkpoint {path} could not be deleted: {error.strerror}") from error
