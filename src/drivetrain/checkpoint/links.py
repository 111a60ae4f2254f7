"""`best` and `last` in a run's folder: links to checkpoints, for people and scripts. Nothing of the run reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.runtime.storage import point

NAMES = ("best", "last")
OF_A_RUN = "checkpoints"  # the folder beside which they lie


def link(newest: Path, best_step: int | None) -> None:
    """Points the links beside a folder of checkpoints at the newest one and at that of the best evaluation, if kept.

    Where the file system has no links, or something else has such a name, there are none; nor beside a state that is
    kept elsewhere, such as the one before a bad step.
    """
    if newest.parent.name != OF_A_RUN:
        return
    kept = {path.name: path for path in newest.parent.glob("step-*")}
    best = next((path for name, path in kept.items() if name == f"step-{best_step or 0:08d}"), None)
    for name, target in zip(NAMES, (best, newest), strict=True):
        point(newest.parent.parent / name, target)


def best_step(facts: Mapping[str, Any]) -> int | None:
    """Returns the step of the run's best evaluation so far, as a checkpoint's manifest has it."""
    found = (facts.get("best") or {}).get("step")
    return found if isinstance(found, int) else None
