"""Which checkpoints are kept."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from drivetrain.checkpoint.directory import hidden, read_manifest, steps, verify
from drivetrain.errors import RunError


def prune(root: Path, keep_last: int, keep_best: int, higher_is_better: bool) -> None:
    """Delete all but the newest `keep_last` and the best `keep_best` (by the metric in their manifests).

    If none of those verifies, the newest that does is kept besides. RunError if one cannot be deleted.
    """
    everything = steps(root)
    kept = set(everything[-keep_last:]) | set(_by_metric(root, higher_is_better)[:keep_best])
    doomed = [path for path in everything if path not in kept]
    if not doomed:
        return
    # kept ones first: the newest was just written and is good, so that as a rule this reads a single checkpoint
    newest_first = sorted(reversed(everything), key=lambda path: path not in kept)
    good = next((path for path in newest_first if not verify(path)), None)
    for path in doomed:
        if good is not None and path != good:
            _delete(path)


def best(root: Path, higher_is_better: bool) -> Path | None:
    """The checkpoint with the best metric; the earliest of equals; None if none was evaluated."""
    ranked = _by_metric(root, higher_is_better)
    return ranked[0] if ranked else None


def _by_metric(root: Path, higher_is_better: bool) -> list[Path]:
    scored = []
    for path in steps(root):
        try:
            metric = read_manifest(path).facts.get("metric")
        except (OSError, ValueError):
            continue  # damaged: it cannot be called best, and resuming says what is wrong with it
        if isinstance(metric, int | float) and not math.isnan(metric):
            scored.append((-metric if higher_is_better else metric, path))
    return [path for _, path in sorted(scored, key=lambda pair: pair[0])]


def _delete(path: Path) -> None:
    # renamed first: a kill in the middle of deleting leaves nothing that looks whole
    aside = hidden(path, "deleted")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        path.rename(aside)
    except OSError as error:
        raise RunError(f"the old checkpoint {path} could not be deleted: {error.strerror}") from error
    # what cannot go yet (a file still open, over NFS) goes when the next run cleans up
    shutil.rmtree(aside, ignore_errors=True)
