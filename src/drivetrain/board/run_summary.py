"""The summary of a run that lists show, from its folder and the entry of the queue that made it."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from drivetrain.board.last_start import LastStarts
from drivetrain.board.records import Entry, Record
from drivetrain.config.adapter import PROMPTS
from drivetrain.config.files import read_yaml
from drivetrain.errors import UserError
from drivetrain.runtime.lock import LOCK
from drivetrain.runtime.strict_json import plain
from drivetrain.tracking.jsonl import FILE_NAME, parsed

BESIDE = "board.json"  # tags and a note of a run, in its folder
EDGE = 1 << 16  # bytes that are read of the beginning and of the end of events.jsonl


class Beside(Record):
    """A user's own words about a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tags: list[str] = Field(default=[], max_length=20)
    note: str = Field(default="", max_length=4000)


def summary(folder: Path, entry: Entry | None, works: bool, is_needed: bool, starts: LastStarts) -> dict[str, Any]:
    """Returns what is shown of a run in a list.

    works: whether a process holds its folder; is_needed: whether anything of it waits or works; starts: of all runs.
    """
    last, evaluation, finished = _edges(folder / FILE_NAME)
    started = starts.of(folder / FILE_NAME)
    if finished and started.get("time", "") > finished.get("time", ""):
        finished = {}  # of an earlier start, whose end lies at the edge that was read
    status, message = _status(entry, works, started, finished)
    run = config_of(folder)
    beside = _beside(folder)
    total = started.get("total_steps")
    rate = last.get("samples_per_second")
    owner = None if entry is None else entry.asked.owner
    return {
        "name": folder.name,
        "status": status,
        "message": message,
        **_described(run),
        "created": started.get("time") or (entry.asked.created if entry else _changed(folder)),
        "changed": _changed(folder / FILE_NAME) or _changed(folder),
        "step": last.get("step", started.get("first_step", 0)),
        "total_steps": total,
        "epoch": last.get("epoch"),
        "loss": last.get("loss"),
        "metrics": evaluation.get("metrics", {}),
        "samples_per_second": rate,
        "remaining_seconds": _remaining(started, last) if status == "running" else None,
        "tags": beside.tags,
        "note": beside.note,
        "owner": owner,
        "entry": None if entry is None else entry.id,
        "can": [each for each in _can(status, entry, folder) if each != "delete" or not is_needed],
        "cursor": sign_of(folder / FILE_NAME),
    }


def _status(
    entry: Entry | None, works: bool, started: dict[str, Any], finished: dict[str, Any]
) -> tuple[str, str | None]:
    if entry is not None and entry.is_live:
        if entry.state != "running":
            return entry.state, None
        begun = entry.claim is not None and started.get("time", "") >= entry.claim.time
        return ("running", None) if begun else ("starting", "loading PyTorch, the model and the data")
    if works:
        return "running", "started outside the board"
    begun = entry is not None and entry.claim is not None and started.get("time", "") < entry.claim.time
    if finished and not (begun and entry is not None and entry.state in ("failed", "refused", "lost")):
        return finished["status"], finished.get("message") or None
    if entry is not None:
        return entry.state, entry.reason
    why = "its process ended without a word: it was killed, or the machine was restarted"
    return ("lost", why) if started else ("unknown", None)


def _can(status: str, entry: Entry | None, folder: Path) -> list[str]:
    """Returns what may be done with the run now."""
    if status == "queued":
        return ["cancel", "clone"]
    if status in ("starting", "running", "stopping"):
        ours = entry is not None and entry.is_live
        return ["stop", "kill", "clone"] if ours and status != "stopping" else ["kill", "clone"] if ours else ["clone"]
    saved = folder / "checkpoints"
    has_saved = saved.is_dir() and any(not each.name.startswith(".") for each in saved.iterdir())
    return [*(["resume", "evaluate", "predict", "export"] if has_saved else []), "clone", "delete"]


def _edges(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the last point, the last evaluation and, if no start came after it, the end of a run.

    Only the file's edges are read: the middle of a long curve says nothing about its state.
    """
    last: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    finished: dict[str, Any] = {}
    for line in _edge_lines(file):
        event = parsed(line)
        if event is None:
            continue
        kind = event["event"]
        if kind == "run_started":
            finished = {}
        elif kind == "step":
            last = event
        elif kind == "evaluation":
            evaluation = event
        elif kind == "run_finished":
            finished = event
    return plain(last), plain(evaluation), plain(finished)


def _edge_lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= 4 * EDGE:
                return opened.read().split(b"\n")
            head = opened.read(EDGE)
            opened.seek(size - EDGE)
            return [*head.split(b"\n")[:-1], *opened.read(EDGE).split(b"\n")[1:]]
    except OSError:
        return []


def _remaining(started: dict[str, Any], last: dict[str, Any]) -> float | None:
    """Returns the seconds to the end of the steps, at the speed of this start so far."""
    total, first, step = started.get("total_steps"), started.get("first_step", 0), last.get("step", 0)
    if not total or step <= first:
        return None
    with contextlib.suppress(KeyError, ValueError):
        begun, now = (datetime.fromisoformat(each["time"]) for each in (started, last))
        return float((now - begun).total_seconds() / (step - first) * (total - step))
    return None


def config_of(folder: Path) -> dict[str, Any]:
    try:
        return read_yaml(folder / "run.yaml")
    except UserError:
        return {}


def _described(run: dict[str, Any]) -> dict[str, Any]:
    """Returns what a list shows of a run's settings."""
    workload, engine = _block(run, "workload"), run.get("engine")
    model = _block(workload, "model")
    own = _block(model, "config").get("model_type")
    kinds = [str(each) for each in (workload.get("type"), workload.get("stage")) if each]
    return {
        "workload": " ".join(kinds) or None,
        "model": model.get("path") or own,
        "engine": engine.get("name") if isinstance(engine, dict) else engine,
        "precision": run.get("precision"),
        "ranks": run.get("processes"),
        "has_base": _has_base(run.get("adapter")),
    }


def _has_base(adapter: Any) -> bool:
    """Returns whether a run's weights are its base's once its adapter is switched off: no virtual tokens stand before
    it, and neither PiSSA nor training changed them."""
    blocks = adapter if isinstance(adapter, list) else [adapter]
    named = [{"method": each} if isinstance(each, str) else each for each in blocks]
    return all(
        isinstance(each, dict)
        and each.get("method") not in PROMPTS
        and not each.get("pissa")
        and not each.get("train_also")
        for each in named
    )


def _block(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _beside(folder: Path) -> Beside:
    try:
        return Beside.model_validate_json((folder / BESIDE).read_bytes())
    except (OSError, ValidationError):
        return Beside()


def is_run(folder: Path) -> bool:
    """Returns whether a run lies in a folder. One that has just begun has only its lock; so has a comparison, beside
    its cells."""
    if any((folder / name).is_file() for name in (FILE_NAME, "run.yaml", "environment.json")):
        return True
    return (folder / LOCK).exists() and not any((folder / name).exists() for name in ("cells", "rows.json"))


def sign_of(file: Path | str) -> str | None:
    """Returns what changes when a file does."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def _changed(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="milliseconds")
    return None
