"""Finds the checkpoints of a folder by their names alone, without importing what reads them."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.errors import UserError, problem
from drivetrain.runtime.storage import entries

STEP = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(r"\.(step-(\d{8,}))\.(partial|replaced|deleted)-(\d+)")
MOST_LISTED = 20


def finished(root: Path) -> dict[int, Path]:
    """Returns step → finished checkpoint, oldest first. One whose replacement was killed counts, under its hidden
    name."""
    found: dict[int, Path] = {}
    for path in entries(root):
        if (name := HIDDEN.fullmatch(path.name)) and name[3] == "replaced":
            found.setdefault(int(name[2]), path)
        elif name := STEP.fullmatch(path.name):
            found[int(name[1])] = path
    return {step: path for step, path in sorted(found.items()) if path.is_dir()}


def check_there(given: str, root: Path, field: str) -> None:
    """Raises UserError if there is no such checkpoint, as far as names show. given: best, last or a folder."""
    if given not in ("best", "last"):
        check_named(given, root, field)
    elif not finished(root):
        raise none_good(root, field)


def none_good(root: Path, field: str) -> UserError:
    return problem(field, f"{root} holds no good checkpoint", "train first, or give the folder of one")


def check_named(given: str, root: Path, field: str) -> Path:
    """Returns the folder of a checkpoint that is named by its path, or by its step alone (44, step-44).

    root: the folder of the run's checkpoints. Raises UserError for one that is not there, with the steps that are.
    """
    path = Path(given)
    if path.is_dir():
        return path
    there = finished(root)
    bare = re.fullmatch(r"(?:step-)?(\d+)", given)
    if bare and int(bare[1]) in there:
        return there[int(bare[1])]
    if not there:
        why = f"{given} is no checkpoint folder, and {root} holds no checkpoint"
        raise problem(field, why, "train first, or give the folder of one")
    listed = [str(step) for step in there][-MOST_LISTED:]
    steps = f"the step{'s' * (len(there) > 1)} {'..., ' * (len(there) > MOST_LISTED)}{', '.join(listed)}"
    asked = re.search(r"(\d+)/*$", given)
    near = min(there, key=lambda step: abs(step - int(asked[1]))) if asked else max(there)
    why = f"{given} is no checkpoint folder; {root} holds {steps}"
    raise problem(field, why, f"give best, last, a step, or a folder, as {there[near]}")
