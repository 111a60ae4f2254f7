"""Comparisons: one run file trained along several axes, as `drivetrain compare` does, a folder each among the runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from drivetrain.board.access import User
from drivetrain.board.board import Board, refuse_others, same
from drivetrain.board.entries import RUN_FILE, id_of
from drivetrain.board.queue import digest_of, unknown_devices
from drivetrain.board.records import Asked, Entry, now
from drivetrain.board.runs import size_of
from drivetrain.config.axes import read_axes
from drivetrain.errors import problem
from drivetrain.runtime.strict_json import plain
from drivetrain.web.refusals import Refusal

VERB = "compare"
# as compare/kept.py has them, which imports PyTorch
ROWS, RESULT, PAGE = "rows.json", "comparison.json", "comparison.html"
MOST_CELLS = 64  # of a form; more are for the command line


@dataclass(frozen=True)
class Wanted:
    """A comparison that a form asks for. axes: KEY=VALUE,VALUE; seeds: runs of each cell."""

    yaml: str
    axes: Sequence[str]
    seeds: int = 1
    devices: list[str] | None = None


def start(board: Board, user: User, key: str, wanted: Wanted) -> tuple[Entry, bool]:
    """Queues a comparison. Raises UserError with all problems of the run file and the axes."""
    digest = digest_of(verb=VERB, text=wanted.yaml, axes=wanted.axes, seeds=wanted.seeds, devices=wanted.devices)
    name = id_of(user.name, key)
    earlier = board.queue.entries.one(name)
    if earlier is not None:
        return same(earlier, digest), False
    unknown_devices(wanted.devices)
    run = board.usable(user, wanted.yaml, wanted.axes)
    _, axes = read_axes(wanted.axes)
    cells = prod(len(axis.values) for axis in axes) * wanted.seeds
    if not axes:
        raise problem("axes", "there is nothing to compare", "give a field two values or more")
    if cells > MOST_CELLS:
        raise problem("axes", f"they make {cells} runs", f"give at most {MOST_CELLS}, or use drivetrain compare")
    on_gpu = board.machine.machine().device == "cuda" and run.device != "cpu"
    with board.queue.with_lock():
        free = board.runs.free_name(f"{run.name}-compare")
        file = board.queue.entries.folder / name / RUN_FILE
        # no text of an axis may be read as an option
        words = [VERB, f"--seeds={wanted.seeds}", f"--output={board.root / free}", "--", str(file), *wanted.axes]
        asked = Asked(
            id=name,
            digest=digest,
            verb=VERB,
            run=free,
            words=words,
            owner=user.name,
            created=now(),
            device="cuda" if on_gpu else "cpu",
            count=board.machine.machine().device_count if on_gpu else 1,  # any cell may want them
            wanted=wanted.devices,
        )
        return board.queue.add(asked, {RUN_FILE: wanted.yaml})


def listed(board: Board) -> list[dict[str, Any]]:
    """Returns all comparisons, the newest first: name, entry and its state, and whether there is a result."""
    entries = _newest(board)
    names = {*entries, *_folders(board.root)}
    found = [
        {
            "name": name,
            "entry": entries[name].id if name in entries else None,
            "state": entries[name].state if name in entries else "completed",
            "has_result": (board.root / name / RESULT).is_file(),
            "created": entries[name].asked.created if name in entries else _written(board.root / name / ROWS),
        }
        for name in names
    ]
    return sorted(found, key=lambda each: (each["created"], each["name"]), reverse=True)


def one(board: Board, name: str) -> dict[str, Any]:
    """Returns a comparison: its entry, its rows without the reports of their runs, and its advice. Raises Refusal
    (404)."""
    entry = _newest(board).get(name)
    folder = board.runs.folder(name)
    if entry is None and not (folder / ROWS).is_file():
        raise Refusal(404, f"there is no comparison {name!r}", "no_comparison", "name")
    result = None
    with suppress(OSError, ValueError):
        result = plain(json.loads((folder / RESULT).read_text(encoding="utf-8")))
        result["rows"] = [{key: row[key] for key in row if key != "runs"} for row in result["rows"]]
    return {"name": name, "entry": None if entry is None else entry.as_dict(), "result": result}


def page(board: Board, name: str) -> Path:
    """Returns the page of a comparison, a file that stands by itself. Raises Refusal (404)."""
    file = board.runs.folder(name) / PAGE
    if one(board, name)["result"] is None or not file.is_file():
        raise Refusal(404, "the comparison has no page yet", "no_comparison", "name")
    return file


def delete(board: Board, user: User, name: str) -> int:
    """Deletes a comparison with its runs. Returns the bytes that it had."""
    with board.queue.with_lock():
        entry = _newest(board).get(name)
        one(board, name)
        refuse_others(user, None if entry is None else entry.asked.owner)
        if entry is not None and entry.is_live:
            raise Refusal(409, f"the comparison is {entry.state}: end it first", "busy")
        folder = board.runs.folder(name)
        size = size_of(folder)
        aside = board.root / f".deleted-{os.getpid()}-{threading.get_ident()}-{name}"
        with suppress(FileNotFoundError):  # one that ended before it made a folder
            folder.rename(aside)
        for each in board.runs.entries_of(name):
            board.queue.entries.forget(each)
    if aside.is_symlink():
        aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)
    return size


def _newest(board: Board) -> dict[str, Entry]:
    found = [each for each in board.queue.entries.all() if each.asked.verb == VERB]
    return {each.asked.run: each for each in sorted(found, key=lambda each: each.asked.created)}


def _folders(root: Path) -> list[str]:
    with suppress(OSError), os.scandir(root) as found:
        return [each.name for each in found if not each.name.startswith(".") and Path(each.path, ROWS).is_file()]
    return []


def _written(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="milliseconds")
