"""One run in detail: its settings, report, checkpoints, files and the events that say something in words."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from drivetrain.board.curves import Curves
from drivetrain.board.run_summary import config_of
from drivetrain.board.runs import Runs, files_of, size_of
from drivetrain.run_page.record import json_of
from drivetrain.runtime.strict_json import plain
from drivetrain.web.refusals import Refusal

MOST_FILES = 2000
WHAT_HAPPENS = {
    "stop": "Saves a checkpoint after the step it is in, then ends. Resume goes on from there, exactly.",
    "kill": "Ends its processes at once, without saving: the steps since the newest checkpoint are lost.",
    "resume": "Goes on from the newest good checkpoint, with the same run file.",
    "delete": "Deletes its folder with all checkpoints, and its entries in the queue. This cannot be undone.",
}


def details(runs: Runs, curves: Curves, name: str) -> dict[str, Any]:
    """Returns all that is known of a run, except its curve."""
    found, folder = runs.one(name), runs.folder(name)
    files = files_of(folder)
    return {
        **found,
        "yaml": runs.submitted(name),
        "config": plain(config_of(folder)),
        "report": json_of(folder / "report.json"),
        "environment": json_of(folder / "environment.json"),
        "bytes": sum(each["bytes"] for each in files),
        "checkpoints": checkpoints(folder),
        "files": files[:MOST_FILES],
        "entries": [each.as_dict() for each in runs.entries_of(name)],
        "events": curves.in_words(folder),
        "actions": {each: WHAT_HAPPENS[each] for each in found["can"] if each in WHAT_HAPPENS},
    }


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Returns the checkpoints of a run, the newest first."""
    links = {each: (folder / each).resolve() for each in ("best", "last") if (folder / each).is_symlink()}
    root = folder / "checkpoints"
    found = sorted(root.glob("step-*"), reverse=True) if root.is_dir() else []
    return [
        {
            "name": each.name,
            "step": int(number) if (number := each.name.rpartition("-")[2]).isdecimal() else None,
            "bytes": size_of(each),
            "best": links.get("best") == each.resolve(),
            "last": links.get("last") == each.resolve(),
        }
        for each in found
        if each.is_dir()
    ]


def file_in(folder: Path, inner: str) -> Path:
    """Returns a file of a run's folder. Raises Refusal (404) for one elsewhere: by .., by a link, by a sibling's
    name."""
    place = folder.resolve()
    if "\0" not in inner:
        with contextlib.suppress(OSError):
            found = (place / inner).resolve(strict=True)
            if found.is_relative_to(place) and found.is_file():
                return found
    raise Refusal(404, "there is no such file in this run", "no_file")
