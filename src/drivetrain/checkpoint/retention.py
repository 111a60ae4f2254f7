"""Which checkpoints are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drivetrain.checkpoint.directory import read_manifest, steps


def prune(root: Path, keep_last: int, keep_best: int, higher_is_better: bool) -> None:
    """Delete all but the newest `keep_last` and the best `keep_best` (by the metric in their manifests)."""
    everything = steps(root)
    kept = set(everything[-keep_last:]) | set(_by_metric(root, higher_is_better)[:keep_best])
    for path in everything:
        if path not in kept:
            # renamed first: a kill in the middle of deleting leaves nothing that looks whole
            hidden = path.with_name(f".old-{path.name}.partial-{os.getpid()}")
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def best(root: Path, higher_is_better: bool) -> Path | None:
    """The checkpoint with the best metric; the earliest of equals; None if none was evaluated."""
    ranked = _by_metric(root, higher_is_better)
    return ranked[0] if ranked else None


def _by_metric(root: Path, higher_is_better: bool) -> list[Path]:
    scored = []
    for path in steps(root):
        try:
            metric = read_manifest(path)["facts"].get("metric")
        except (OSError, ValueError):
            continue  # damaged: it cannot be called best, and resuming says what is wrong with it
        if metric is not None:
            scored.append((-metric if higher_is_better else metric, path))
    return [path for _, path in sorted(scored, key=lambda pair: pair[0])]
